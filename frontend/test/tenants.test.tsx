import { screen, within } from "@testing-library/react";
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

test("a revoked key is shown as revoked and offers no second revocation", async () => {
  await open("/tenants/acme");
  const row = (await screen.findByText("billing-service")).closest("tr") as HTMLElement;
  press("Revoke", row);
  const box = await dialog(/Revoke key/);
  press("Revoke key", box);
  await within(row).findByText("revoked");
  expect(within(row).queryByRole("button", { name: "Revoke" })).toBeNull();
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
