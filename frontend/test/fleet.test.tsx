import { act, screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { timeRange } from "@/ui/Chart";
import { dialog, greet, open, press, type } from "./harness";

const GIB = 2 ** 30;

test("a chart of a single sample shows seconds, not years", () => {
  expect(timeRange(1_000, 1_000)).toEqual([990, 1_000]);
  expect(timeRange(1_000, 1_300)).toEqual([1_000, 1_300]);
  expect(timeRange(null, null)).toEqual([null, null]);
});

function telemetry(utilization: number, generated: number, at: number) {
  return {
    type: "telemetry",
    node_id: "n1",
    at,
    devices: [{ index: 0, utilization, temperature_c: 61, memory_used_bytes: GIB }],
    replicas: [
      {
        replica_id: "smollm2.v1.g3.0",
        version_id: "smollm2@v1",
        device_index: 0,
        generated_tokens: generated,
      },
    ],
  };
}

test("each node shows its devices with the memory that replicas hold", async () => {
  await open("/fleet");
  const node = await screen.findByRole("article", { name: "Node n1" });
  within(node).getByRole("img", { name: "Memory: 1.5 GiB of 4.0 GiB held by 1 replica" });
  within(node).getByText("smollm2@v1");
  within(node).getByText("loading");
});

test("telemetry moves the figures without asking the server again", async () => {
  const harness = await open("/fleet");
  const socket = greet(harness);
  const node = await screen.findByRole("article", { name: "Node n1" });
  const before = harness.backend.calls.length;
  act(() => socket.receive(telemetry(0.25, 100, 10)));
  act(() => socket.receive(telemetry(0.75, 300, 12)));
  within(node).getByRole("img", { name: "Utilisation 75 %" });
  within(node).getByText("75 % · 61 °C");
  expect(screen.getByText("tokens per second").previousSibling?.textContent).toBe("100");
  expect(harness.backend.calls.length).toBe(before);
});

test("each replica's tier is what its node last said", async () => {
  const harness = await open("/fleet");
  const socket = greet(harness);
  const node = await screen.findByRole("article", { name: "Node n1" });
  expect(within(node).getAllByText("resident").length).toBeGreaterThan(0);
  const report = telemetry(0.5, 100, 10);
  const replicas = report.replicas.map((each) => ({ ...each, tier: "host" }));
  act(() => socket.receive({ ...report, replicas }));
  within(node).getByText("host");
});

test("a replica shows where it is and where it is placed, with since when", async () => {
  const harness = await open("/fleet?node=n1", {
    prepare: ({ state }) => {
      const [replica] = state.nodes[0].replicas;
      Object.assign(replica, { tier: "warm", tier_reason: "Others are asked for more." });
      Object.assign(replica, { live_tier: "storage", live_tier_since: 5 });
    },
  });
  const socket = greet(harness);
  const node = await screen.findByRole("article", { name: "Node n1" });
  within(node).getByText("storage");
  within(node).getByText(", placed warm");
  const drawer = await dialog("Node n1");
  const table = within(drawer).getByRole("table", { name: "Replicas on this node" });
  expect(table.textContent).toMatch(/storage .*ago/);
  within(table).getByTitle("Others are asked for more.");
  const report = telemetry(0.5, 100, 10);
  const replicas = report.replicas.map((each) => ({ ...each, tier: "host", tier_since: 9 }));
  act(() => socket.receive({ ...report, replicas }));
  expect(table.textContent).toMatch(/host .*ago/);
  within(node).getByText("host");
  expect(within(node).queryByText(", placed warm")).toBeNull();
});

test("draining asks first, sends the reason and shows the node as draining", async () => {
  const { backend } = await open("/fleet");
  const node = await screen.findByRole("article", { name: "Node n1" });
  press("Drain", node);
  await dialog("Drain n1");
  type("Reason", "new driver");
  press("Drain node");
  await within(node).findByText("draining");
  const call = backend.calls.findLast((each) => each.method === "POST");
  expect(call?.body).toEqual({ reason: "new driver" });
  expect(call?.headers["x-csrftoken"]).toBe("csrf-1");
  expect(call?.headers["idempotency-key"]).toMatch(/^[0-9a-f]{32}$/);
});

test("a node says why it drains, and for which versions the drain waits", async () => {
  await open("/fleet?node=n1", {
    prepare: ({ state }) => {
      Object.assign(state.nodes[0], {
        draining: true,
        drain_reason: "new driver",
        drain_waits_for: ["smollm2@v1"],
      });
    },
  });
  const waits = "The drain waits for room on other nodes for smollm2@v1.";
  const node = await screen.findByRole("article", { name: "Node n1" });
  within(node).getByText("Draining: new driver");
  within(node).getByText(waits);
  const drawer = await dialog("Node n1");
  within(drawer).getByText("Draining: new driver");
  within(drawer).getByText(waits);
});

test("only a lost node can be removed, and then it is gone from the page", async () => {
  const { backend } = await open("/fleet", {
    prepare: ({ state }) => {
      state.nodes[0].status = "lost";
    },
  });
  const node = await screen.findByRole("article", { name: "Node n1" });
  const other = screen.getByRole("article", { name: "Node n2" });
  expect(within(other).queryByRole("button", { name: "Remove" })).toBeNull();
  press("Remove", node);
  await dialog("Remove n1");
  type("Reason", "außer Betrieb");
  press("Remove node");
  await waitFor(() => expect(screen.queryByRole("article", { name: "Node n1" })).toBeNull());
  const call = backend.calls.findLast((each) => each.method === "DELETE");
  expect(call?.headers["x-reason"]).toBe(encodeURIComponent("außer Betrieb"));
});

test("the open node is in the URL, and a link to it opens it", async () => {
  await open("/fleet?node=n2");
  const drawer = await dialog("Node n2");
  within(drawer).getByText("rack-b");
  within(drawer).getByText("builtin");
  within(drawer).getByRole("table", { name: "Replicas on this node" });
});

test("a viewer is offered no order", async () => {
  await open("/fleet", { role: "viewer" });
  const node = await screen.findByRole("article", { name: "Node n1" });
  expect(within(node).queryByRole("button", { name: "Drain" })).toBeNull();
});

test("an empty fleet names the command that starts an agent", async () => {
  await open("/fleet", {
    prepare: (backend) => {
      backend.state.nodes = [];
    },
  });
  await screen.findByRole("heading", { name: "No node has joined" });
  screen.getByText(/python -m gpuagent --node-id n1/);
});

test("what is stuck says since when and why, and is counted", async () => {
  await open("/fleet", {
    prepare: ({ state }) => {
      const since = Date.now() / 1000 - 185;
      const refused = { stuck_since: since, stuck_code: "refused", stuck_reason: "it has (5, 40)" };
      Object.assign(state.nodes[1], refused);
      const waits = { stuck_since: since, stuck_code: "not_resident", stuck_reason: "needs 6 GB" };
      Object.assign(state.nodes[0].replicas[1], { state: "pending", ...waits });
    },
  });
  const node = await screen.findByRole("article", { name: "Node n1" });
  expect(within(node).getByRole("status").textContent).toBe("stuck 3 min ago: needs 6 GB");
  const other = screen.getByRole("article", { name: "Node n2" });
  const said = within(other).getByRole("status").textContent;
  expect(said).toBe("has not accepted its plan 3 min ago: it has (5, 40)");
  expect(screen.getByText("stuck now").previousSibling?.textContent).toBe("2");
});

test("what is hatched in the memory bar is named beside it", async () => {
  const harness = await open("/fleet");
  const socket = greet(harness);
  const node = await screen.findByRole("article", { name: "Node n1" });
  expect(within(node).queryByText("other processes")).toBeNull();
  const message = telemetry(0.25, 100, 10);
  const devices = message.devices.map((one) => ({ ...one, foreign_bytes: GIB / 2 }));
  act(() => socket.receive({ ...message, devices }));
  const row = within(node).getByText("other processes").closest("li") as HTMLElement;
  within(row).getByText("512 MiB");
});
