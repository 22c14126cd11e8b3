import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { dialog, open, press, type } from "./harness";

test("a new tenant leads to its page, whose next step is a key", async () => {
  await open("/tenants");
  press("Create tenant");
  const box = await dialog("Create tenant");
  type(/^Name/, "initech");
  press("Create tenant", box);
  await screen.findByRole("heading", { name: "initech" });
  await screen.findByRole("heading", { name: "No key yet" });
});

test("an issued key's secret is shown once and nowhere after", async () => {
  await open("/tenants/acme");
  await screen.findByText("billing-service");
  press("Issue key");
  const box = await dialog("Issue a key to acme");
  type(/^Name/, "ci");
  press("Issue key", box);
  const shown = await dialog("Copy the key now");
  const secret = within(shown).getByLabelText<HTMLInputElement>("API key").value;
  expect(secret).toMatch(/^sk_[0-9a-f]{12}\.top-secret$/);
  press("I have stored it", shown);
  await screen.findByText("ci");
  expect(document.body.innerHTML).not.toContain("top-secret");
});

async function chosen(name: string): Promise<HTMLElement> {
  const row = (await screen.findByText("billing-service")).closest("tr") as HTMLElement;
  press("Actions for billing-service", row);
  fireEvent.click(await screen.findByRole("menuitem", { name }));
  return row;
}

test("a revoked key is shown as revoked, keeps the reason and offers nothing more", async () => {
  const { backend } = await open("/tenants/acme");
  const row = await chosen("Revoke");
  const box = await dialog(/Revoke key/);
  type("Reason", "café", box);
  press("Revoke key", box);
  await within(row).findByText("revoked");
  expect(within(row).queryByRole("button", { name: /Actions/ })).toBeNull();
  const call = backend.calls.findLast((each) => each.method === "DELETE");
  expect(call?.headers["x-reason"]).toBe("caf%C3%A9");
});

test("a rotated key shows its new secret once, and until when the old one is good", async () => {
  await open("/tenants/acme");
  const row = await chosen("Rotate secret");
  press("Make a new secret", await dialog(/Rotate the secret/));
  const shown = await dialog("Copy the key now");
  const secret = within(shown).getByLabelText<HTMLInputElement>("API key").value;
  expect(secret).toBe("sk_4f2a91c07d3e.newer-secret");
  press("I have stored it", shown);
  await within(row).findByText(/Old secret until/);
  expect(document.body.innerHTML).not.toContain("newer-secret");
});

test("a suspended key can be resumed", async () => {
  await open("/tenants/acme");
  const row = await chosen("Suspend");
  press("Suspend key", await dialog(/Suspend key/));
  await within(row).findByText("suspended");
  await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  await chosen("Resume");
  press("Resume key", await dialog(/Resume key/));
  await within(row).findByText("active");
});

test("suspending keeps the reason and can be undone", async () => {
  const { backend } = await open("/tenants/acme");
  await screen.findByText("Active · standard tier");
  press("Suspend");
  await dialog("Suspend acme");
  type("Reason", "unpaid");
  press("Suspend tenant");
  await screen.findByText("Suspended: unpaid");
  press("Resume");
  press("Resume tenant", await dialog("Resume acme"));
  await screen.findByText("Active · standard tier");
  expect(backend.state.tenants[0].suspended).toBe(false);
});

test("the budget shows what is spent, reserved and left", async () => {
  const { backend } = await open("/tenants/acme");
  await screen.findByText("1,284,310 spent · 2,560 reserved for running requests · 3,713,130 left");
  press("Set budget");
  const box = await dialog("Budget of acme");
  type("Tokens", "9000000", box);
  press("Save budget", box);
  await screen.findByText("9,000,000 tokens a month");
  const call = backend.calls.findLast((each) => each.method === "PUT");
  expect(call?.headers["if-match"]).toBe('"1"');
});
