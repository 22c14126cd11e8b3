import { act, screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { startOf } from "@/api/usage";
import { choose, dialog, greet, type Harness, liveEvent, open, press, type } from "./harness";

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
  const [, chosen, dearer] = within(table).getAllByRole("row") as HTMLElement[];
  expect(chosen?.getAttribute("aria-current")).toBe("true");
  within(chosen as HTMLElement).getByText("Chosen");
  expect(dearer?.getAttribute("aria-current")).toBeNull();
  within(dearer as HTMLElement).getByText("1.150");
  within(dearer as HTMLElement).getByText("0.600 dearer");
  const ruledOut = within(box).getByRole("table", { name: "Ruled out of attempt 1" });
  within(ruledOut).getByText("Too hot");
  within(ruledOut).getByText(/83.5 C, the limit is 83 C/);
  within(box).getByText(/costs least of the 2 that could take it, of 3 replicas/);
  within(box).getByText(/the same, bit for bit/);
});

test("a request that was not sampled says so, and of how many it is kept", async () => {
  await open(`/requests?open=req-${"c".padStart(32, "5ba1d")}`);
  const box = await dialog("Request");
  await within(box).findByText("Not kept: the sampled share is 1 %");
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

const weigh = async (role?: string) => {
  const harness = await open("/settings", { role });
  await screen.findByText("2, by default 0.5");
  return harness;
};
const patches = ({ backend }: Harness) => backend.calls.filter(({ method }) => method === "PATCH");

test("a changed weight is tried without effect first, and sent with its reason and ETag", async () => {
  const harness = await weigh();
  press("Change weights");
  const box = await dialog("Change the routing weights");
  expect(
    within(box).getByRole<HTMLButtonElement>("button", { name: "Change weights" }).disabled,
  ).toBe(true);
  type("α, latency", "1.5", box);
  await within(box).findByText("Would append RoutingWeightsSet:", {}, { timeout: 3000 });
  within(box).getByText("α, latency: 1 → 1.5");
  expect(patches(harness).map(({ query, body }) => [query.dry_run, body])).toEqual([
    ["true", { alpha: 1.5 }],
  ]);
  type("Reason", "slow nodes", box);
  press("Change weights", box);
  await screen.findByText("1.5, by default 1");
  const sent = patches(harness).at(-1);
  expect(sent?.body).toEqual({ alpha: 1.5, reason: "slow nodes" });
  expect(sent?.headers["if-match"]).toBe('"1"');
  await screen.findByText(/by user:admin: slow nodes/);
  screen.getByRole("button", { name: "Undo …" });
});

test("weights that the server refuses cannot be sent, and its sentence is shown", async () => {
  await weigh();
  press("Change weights");
  const box = await dialog("Change the routing weights");
  type("Idle", "0.9", box);
  await within(box).findByText("omega sums to 1.", {}, { timeout: 3000 });
  expect(
    within(box).getByRole<HTMLButtonElement>("button", { name: "Change weights" }).disabled,
  ).toBe(true);
});

test("who may only look is not offered to change weights", async () => {
  await weigh("viewer");
  expect(screen.queryByRole("button", { name: "Change weights" })).toBeNull();
});

test("weights that somebody else changes meanwhile are not overwritten unseen", async () => {
  const harness = await weigh();
  press("Change weights");
  const box = await dialog("Change the routing weights");
  const { backend } = harness;
  backend.weigh({ query: {}, headers: {}, body: { gamma: 3 } });
  const socket = greet(harness);
  act(() => socket.receive(liveEvent(backend.state.events.at(-1) as { type: string })));
  await within(box).findByText("The weights were changed meanwhile");
  const gamma = () => within(box).getByLabelText<HTMLInputElement>("γ, loading").value;
  expect(gamma()).toBe("1");
  press("Start from what they are now", box);
  expect(gamma()).toBe("3");
  expect(within(box).queryByText("The weights were changed meanwhile")).toBeNull();
});
