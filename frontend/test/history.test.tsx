import { act, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { gist } from "@/pages/events/gist";
import { event } from "./fake/data.mjs";
import { dialog, greet, type Harness, liveEvent, open, press } from "./harness";

const positions = () =>
  within(screen.getByRole("region", { name: "Events" }))
    .getAllByRole("button")
    .map((row) => Number(row.firstChild?.textContent));

const reads = ({ backend }: Harness) =>
  backend.calls.filter(({ path }) => path.endsWith("/events/")).length;

/** The list is there, and fetched again after the live link's hello. */
async function settled(harness: Harness): Promise<void> {
  await waitFor(() => expect(reads(harness)).toBe(2));
  await waitFor(() => expect(positions().length).toBeGreaterThan(0));
  await act(async () => await new Promise((done) => setTimeout(done, 20)));
}

test("a decision reads as sentences, with scores and what was ruled out", async () => {
  await open("/decisions?open=d-3");
  await screen.findByText("smollm2@v2 starts on n2/0: the version wants 1 replica and has none.");
  screen.getByText("n1/1 was ruled out: draining.");
  screen.getByText("1 replica of big@v1 found no place: no device has 80.0 GiB.");
  expect(screen.getAllByText(/ruled out: needs 80.0 GiB, 2.3 GiB is free\./)).toHaveLength(2);
  const table = screen.getByRole("table", { name: "Candidates for smollm2.v2.g3.0" });
  const best = within(table).getAllByRole("row")[1];
  expect(best?.textContent).toContain("0.810");
  expect(best?.textContent).toContain("chosen");
});

test("a decision counts the replicas of each version, and names a node once", async () => {
  await open("/decisions?open=d-3", {
    prepare: ({ state }) => {
      const [decision] = state.decisions;
      const [start] = decision.started;
      const of = (version_id: string, num = 0) => ({
        ...start,
        assignment: { ...start.assignment, version_id, replica_id: `${version_id}.${num}` },
      });
      start.rejections[0].detail = "node n1 is draining";
      decision.started = [start, of("minilm@v1")];
      decision.stopped = [of("a@v1"), of("a@v1", 1), of("b@v1"), of("c@v1")];
    },
  });
  await screen.findByText(
    "1 replica of smollm2@v2 and 1 replica of minilm@v1 started, 4 replicas stopped, 1 replica of big@v1 without a place",
  );
  expect(screen.getAllByText("n1/1 was ruled out: its node is draining.").length).toBeGreaterThan(
    0,
  );
});

test("a decision names who is kept in another tier, and why", async () => {
  await open("/decisions?open=d-2");
  await screen.findByText("minilm@v1 is asked for less than smollm2@v1, which takes its place.");
  expect(document.body.textContent).toContain("1 replica of minilm@v1 in another tier");
});

test("pushed events give the list that a fresh fetch would give", async () => {
  const harness = await open("/events");
  await screen.findByRole("region", { name: "Events" });
  const socket = greet(harness);
  await settled(harness);
  for (let count = 0; count < 3; count++) {
    const pushed = harness.backend.append("node-n1", "NodeSuspected", { silent_seconds: 6 }, "x");
    act(() => socket.receive(liveEvent(pushed)));
  }
  await waitFor(() => expect(positions().slice(0, 4)).toEqual([33, 32, 31, 30]));
  const patched = positions();
  act(() => socket.receive({ type: "reset", position: 33 }));
  await waitFor(() => expect(reads(harness)).toBe(3));
  await waitFor(() => expect(positions()).toEqual(patched));
});

test("an event that comes while the list is fetched is not taken away by the answer", async () => {
  const harness = await open("/events");
  await screen.findByRole("region", { name: "Events" });
  const socket = greet(harness); // starts a fetch, whose answer knows nothing of 31
  const pushed = harness.backend.append("node-n1", "NodeSuspected", {}, "x");
  act(() => socket.receive(liveEvent(pushed)));
  await waitFor(() => expect(reads(harness)).toBe(3));
  await waitFor(() => expect(positions()[0]).toBe(31));
});

test("an event that the filters exclude is not pushed into the list", async () => {
  const harness = await open("/events?type=ReplicaFailed");
  await screen.findByRole("region", { name: "Events" });
  const socket = greet(harness);
  await settled(harness);
  const before = positions().length;
  act(() => socket.receive(liveEvent({ ...event(31), type: "NodeLost" })));
  act(() => socket.receive(liveEvent({ ...event(32), type: "ReplicaFailed" })));
  await waitFor(() => expect(positions()).toHaveLength(before + 1));
  expect(positions()[0]).toBe(32);
});

test("a pause keeps the rows and counts what came meanwhile", async () => {
  const harness = await open("/events");
  await screen.findByRole("region", { name: "Events" });
  const socket = greet(harness);
  await settled(harness);
  press("Pause");
  act(() => socket.receive(liveEvent(event(31))));
  await screen.findByRole("button", { name: "Resume (1 new)" });
  expect(positions()[0]).toBe(30);
  press("Resume (1 new)");
  expect(positions()[0]).toBe(31);
});

test("a typed filter goes into the URL and to the server", async () => {
  const { backend } = await open("/events");
  fireEvent.change(await screen.findByLabelText("Stream"), { target: { value: "placement" } });
  await waitFor(() => expect(window.location.search).toBe("?stream=placement"), { timeout: 3000 });
  await waitFor(() => expect(backend.calls.at(-1)?.query.stream).toBe("placement"));
});

test("an event's details show its data, also when it is not among the loaded rows", async () => {
  await open("/events?type=ReplicaFailed&open=3");
  const drawer = await dialog("Event 3");
  await within(drawer).findByText("PlacementDecided");
  expect(within(drawer).getByRole("region", { name: "event data" }).textContent).toContain(
    '"decision_id": "d-3"',
  );
});

test("the ledger is filtered from the URL and opens a record with its times", async () => {
  const { backend } = await open("/requests?outcome=cancelled");
  const table = await screen.findByRole("table", { name: "Requests" });
  await waitFor(() => expect(within(table).getAllByRole("row")).toHaveLength(3));
  expect(backend.calls.findLast(({ path }) => path.endsWith("/requests/"))?.query.outcome).toBe(
    "cancelled",
  );
  fireEvent.click(within(table).getAllByRole("button")[0] as HTMLElement);
  const drawer = await dialog("Request");
  await within(drawer).findByRole("img", { name: /^Queue 3.5 ms, prefill 48 ms, decode/ });
});

test("the audit shows what an order changed and why another was refused", async () => {
  await open("/audit");
  const table = await screen.findByRole("table", { name: "Audit" });
  await within(table).findByText("tier: free → standard");
  fireEvent.click(within(table).getByRole("button", { name: "ChangeTier" }));
  const drawer = await dialog("Audit entry 22");
  await within(drawer).findByText(/invalid_tier: tier is one of/);
  const asked = within(drawer).getByRole("region", { name: "what was asked for" });
  expect(asked.textContent).toContain('"tier": "gold"');
});

test("the audit says in what the prices of an order are", async () => {
  await open("/audit?open=22", {
    prepare: ({ state }) => {
      const entry = state.audit.find(({ position }: { position: number }) => position === 22);
      const price = { input: "0.15", cached_input: "0.075", output: "0.6" };
      Object.assign(entry, { outcome: "done", after: { "version m@v1": { price } } });
    },
  });
  await screen.findByText("Prices are in USD per million tokens.");
  expect(screen.getByRole("region", { name: "after" }).textContent).toContain('"input": "0.15"');
});

test("the audit is searched on the server and its search is in the URL", async () => {
  const { backend } = await open("/audit?outcome=done");
  await screen.findByText("they pay");
  expect(screen.queryByText("ChangeTier")).toBeNull();
  fireEvent.change(screen.getByRole("textbox", { name: "Search" }), {
    target: { value: "nobody" },
  });
  await screen.findByRole("heading", { name: "No entry matches" }, { timeout: 3000 });
  expect(window.location.search).toContain("q=nobody");
  expect(backend.calls.at(-1)?.query).toMatchObject({ outcome: "done", q: "nobody" });
});

test("an event's line names the versions it is about", () => {
  const line = (data: object) => gist({ ...event(1), data: { ...data } });
  const spec = { version: "v2", source: "hf://a/b@c", gpu_memory: 1, colocation: {} };
  expect(line({ name: "m", spec })).toBe("version=v2  source=hf://a/b@c  gpu_memory=1");
  const arms = [{ name: "a", version_id: "m@v1", weight: 9 }];
  expect(line({ arms, sticky: true })).toBe("arms=m@v1:9  sticky=true");
  const started = [{ assignment: { version_id: "m@v1" }, candidates: [] }];
  const unplaced = [{ version_id: "m@v2", num_missing: 1 }];
  expect(line({ decision_id: "d", planned_from: 4, started, stopped: [], unplaced })).toBe(
    "started=m@v1  unplaced=m@v2",
  );
  expect(line({ devices: [{ name: "A100" }] })).toBe("devices=1");
});
