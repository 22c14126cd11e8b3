import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { startOf } from "@/api/usage";
import { choose, dialog, open } from "./harness";

test("usage shows its groups, their total and that the totals were checked", async () => {
  await open("/usage");
  const table = await screen.findByRole("table", { name: "Usage" });
  await within(table).findByText("2026-11-29");
  within(table).getByText("Total");
  expect(within(table).getAllByText("0.0009")).toHaveLength(2);
  await screen.findByText("Every total equals the sum of its records");
  screen.getByText(/9 totals of 12 records, up to record 12/);
});

test("another grouping is in the address and is asked for", async () => {
  const { backend } = await open("/usage?days=30");
  await choose("By", "arm", document.body);
  await screen.findByText("chat / a");
  expect(window.location.search).toContain("by=arm");
  const call = backend.calls.findLast((each) => each.path === "/api/v1/usage/");
  expect(call?.query.group_by).toBe("route,arm");
  expect(call?.query.since).toBe(startOf(30, new Date()).toISOString());
});

test("the last N days are N days where the viewer is, today included", () => {
  const now = new Date(2026, 2, 1, 23, 59);
  expect(startOf(1, now)).toEqual(new Date(2026, 2, 1));
  expect(startOf(7, now)).toEqual(new Date(2026, 1, 23));
});

test("a request shows each of its attempts", async () => {
  await open(`/requests?open=req-${"c".padStart(32, "5ba1d")}`);
  const box = await dialog("Request");
  const table = await within(box).findByRole("table", { name: "Attempts" });
  within(table).getByText("node_lost");
  within(table).getByText("n9");
});

test("a request says why it went where it went, with what lost the others", async () => {
  await open(`/requests?open=req-${"a".padStart(32, "5ba1d")}`);
  const box = await dialog("Request");
  const table = await within(box).findByRole("table", { name: "Candidates of attempt 1" });
  expect(within(table).getAllByRole("row")).toHaveLength(3);
  within(table).getByText("chosen");
  within(table).getByText("1.150");
  const ruledOut = within(box).getByRole("list", { name: "Ruled out" });
  within(ruledOut).getByText(/83.5 C, the limit is 83 C/);
  within(box).getByText(/the same, bit for bit/);
});

test("a request that was not sampled says so, and of how many it is kept", async () => {
  await open(`/requests?open=req-${"c".padStart(32, "5ba1d")}`);
  const box = await dialog("Request");
  await within(box).findByText("Not sampled: the share is 1 %");
});

test("the settings say how long what is kept", async () => {
  await open("/settings");
  await screen.findByText("396 days; up to number 12,000 they are archived");
  expect(screen.getAllByText("for ever")).toHaveLength(2);
});

test("the settings say by which weights replicas are chosen, and which were changed", async () => {
  await open("/settings");
  await screen.findByText("2, by default 0.5");
  screen.getByText("75 °C");
});
