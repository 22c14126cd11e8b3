import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { choose, dialog, open, press, type } from "./harness";

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

test("a key that is suspended says so", async () => {
  const { backend } = await open("/tenants/acme");
  const row = await chosen("Suspend");
  press("Suspend key", await dialog(/Suspend key/));
  await within(row).findByText("suspended");
  expect(backend.state.keys.acme[0].suspended).toBe(true);
});

test("a suspended key can be resumed", async () => {
  await open("/tenants/acme", {
    prepare: (backend) => {
      backend.state.keys.acme[0].suspended = true;
    },
  });
  const row = await chosen("Resume");
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

test("a budget shows what is spent, reserved and left, and changes under the tenant's ETag", async () => {
  const { backend } = await open("/tenants/acme");
  await screen.findByText("1,284,310 tokens spent · 2,560 tokens reserved · 3,713,130 tokens left");
  press("Change");
  const box = await dialog("Budget all of acme");
  type(/^Limit/, "9000000", box);
  press("Save budget", box);
  await screen.findByText("9,000,000 tokens a month");
  const call = backend.calls.findLast((each) => each.method === "PUT");
  expect(call?.path).toBe("/api/v1/tenants/acme/budgets/all/");
  expect(call?.headers["if-match"]).toBe('"1"');
});

test("a budget of one key in money is added beside the tenant's, and removed again", async () => {
  const { backend } = await open("/tenants/acme");
  await screen.findByText("5,000,000 tokens a month");
  press("Add budget");
  const box = await dialog("New budget of acme");
  type(/^Name/, "ci", box);
  await choose("Matches", "one key", box);
  type(/^Key id/, "jwt:ann", box);
  await choose("Counts", "money, in USD", box);
  type(/^Limit/, "12.50", box);
  press("Save budget", box);
  const row = (await screen.findByText("key jwt:ann")).closest("tr") as HTMLElement;
  within(row).getByText("12.50 USD a month");
  const call = backend.calls.findLast((each) => each.method === "PUT");
  expect(call?.body).toEqual({
    scope: "key",
    target: "jwt:ann",
    unit: "money",
    limit: "12.50",
    period: "month",
  });
  press("Remove", row);
  press("Remove budget", await dialog("Remove budget ci"));
  await waitFor(() => expect(screen.queryByText("key jwt:ann")).toBeNull());
  screen.getByText("5,000,000 tokens a month");
});

test("a key shows which budgets its requests must fit", async () => {
  await open("/tenants/acme");
  const row = (await screen.findByText("billing-service")).closest("tr") as HTMLElement;
  within(row).getByText("all, nightly");
});

test("text is captured only once somebody asks for it, under the tenant's ETag", async () => {
  const { backend } = await open("/tenants/acme");
  await screen.findByText("No prompt or answer is kept");
  press("Capture text");
  const box = await dialog("Capture text of acme");
  press("Capture text", box);
  await screen.findByText("Prompts and answers are kept, encrypted");
  const call = backend.calls.findLast((each) => each.method === "PUT");
  expect(call?.path).toBe("/api/v1/tenants/acme/capture/");
  expect(call?.headers["if-match"]).toBe('"1"');
});

test("capturing can be stopped", async () => {
  await open("/tenants/acme", {
    prepare: (backend) => {
      backend.state.tenants[0].captures_text = true;
    },
  });
  await screen.findByText("Prompts and answers are kept, encrypted");
  press("Stop capturing");
  press("Stop capturing", await dialog("Stop capturing text of acme"));
  await screen.findByText("No prompt or answer is kept");
});

test("text is not erased without a reason", async () => {
  const { backend } = await open("/tenants/acme");
  await screen.findByText("No prompt or answer is kept");
  press("Erase text");
  const box = await dialog("Erase text of acme");
  const button = within(box).getByRole<HTMLButtonElement>("button", { name: "Erase text" });
  expect(button.disabled).toBe(true);
  type(/^Reason/, "ticket 4711", box);
  press("Erase text", box);
  await screen.findByText("Text of acme is erased");
  const call = backend.calls.findLast((each) => each.path.endsWith("/erase-text/"));
  expect(call?.body).toEqual({ reason: "ticket 4711" });
});
