import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { open, press } from "./harness";

const proof = async () => within(await screen.findByRole("region", { name: "Proof" }));

test("the events page says what is sealed, and verifies when asked", async () => {
  await open("/events");
  const region = await proof();
  await region.findByText(/28 sealed/);
  region.getByText("not sealed yet");
  await region.findByText("never");
  press("Verify now");
  await region.findByText("Intact");
});

test("a verification that fails names the row", async () => {
  const finding = {
    log: "events",
    position: 7,
    record_id: "tenant-acme:3",
    check: "chain",
    detail: "changed",
  };
  await open("/events", { prepare: ({ state }) => Object.assign(state, { found: finding }) });
  const region = await proof();
  await region.findByText("never");
  press("Verify now");
  await region.findByText("Not intact: events 7 (tenant-acme:3), changed");
});

test("whoever may not verify sees the seals alone", async () => {
  await open("/events", { role: "viewer" });
  const region = await proof();
  await region.findByText(/28 sealed/);
  expect(region.queryByText("Verified")).toBeNull();
  expect(region.queryByRole("button", { name: "Verify now" })).toBeNull();
});
