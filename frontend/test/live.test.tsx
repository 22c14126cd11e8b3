import { act, screen, waitFor } from "@testing-library/react";
import { afterEach, beforeEach, describe, expect, test, vi } from "vitest";
import { LiveLink } from "@/api/live";
import { tokenRate } from "@/api/telemetry";
import { event } from "./fake/data.mjs";
import { FakeSocket } from "./fake/sockets";
import { greet, liveEvent, open } from "./harness";

describe("the link", () => {
  const seen = { events: [] as number[], resets: [] as number[], out: 0 };

  function link(gapless = true): LiveLink {
    const made = new LiveLink(
      "ws://web.test/ws/live",
      {
        onEvent: ({ position }) => seen.events.push(position),
        onReset: (position) => seen.resets.push(position),
        onTelemetry: () => {},
        onUnauthorized: () => {
          seen.out += 1;
        },
      },
      gapless,
    );
    made.start();
    return made;
  }

  const socket = () => FakeSocket.to("/ws/live");
  const push = (position: number) => socket().receive(liveEvent(event(position)));

  function connect(position: number): void {
    socket().accept();
    socket().receive({ type: "hello", position });
  }

  beforeEach(() => {
    vi.useFakeTimers();
    vi.stubGlobal("WebSocket", FakeSocket);
    FakeSocket.opened = [];
    Object.assign(seen, { events: [], resets: [], out: 0 });
  });
  afterEach(() => vi.useRealTimers());

  test("resumes after the last position it has seen", () => {
    link();
    expect(FakeSocket.opened).toHaveLength(1);
    connect(120);
    push(121);
    socket().drop();
    vi.advanceTimersByTime(600);
    socket().accept();
    expect(socket().sent).toEqual([{ type: "subscribe", after: 121 }]);
    socket().receive({ type: "hello", position: 121 });
    push(122);
    expect(seen).toEqual({ events: [121, 122], resets: [120], out: 0 });
  });

  test("waits longer after each failure, at most 15 s", () => {
    link();
    const waits: number[] = [];
    for (let failure = 0; failure < 8; failure++) {
      const before = FakeSocket.opened.length;
      socket().drop();
      let waited = 0;
      while (FakeSocket.opened.length === before) {
        vi.advanceTimersByTime(100);
        waited += 100;
      }
      waits.push(waited);
    }
    expect(waits[0]).toBeLessThanOrEqual(500);
    expect(waits.at(-1)).toBeGreaterThanOrEqual(7_500);
    expect(Math.max(...waits)).toBeLessThanOrEqual(15_000);
  });

  test("refetches on a skipped position and drops a repeated one", () => {
    link();
    connect(10);
    push(11);
    push(11);
    push(14);
    push(15);
    expect(seen.events).toEqual([11, 15]);
    expect(seen.resets).toEqual([10, 14]);
  });

  test("a heartbeat may overtake an event once, not twice", () => {
    const made = link();
    connect(10);
    socket().receive({ type: "heartbeat", position: 11 });
    push(11);
    socket().receive({ type: "heartbeat", position: 11 });
    expect(seen.resets).toEqual([10]);
    socket().receive({ type: "heartbeat", position: 12 });
    socket().receive({ type: "heartbeat", position: 12 });
    expect(seen.resets).toEqual([10, 12]);
    expect(made.snapshot().position).toBe(12);
  });

  test("a user who sees one tenant's events only takes gaps as they come", () => {
    link(false);
    connect(10);
    push(14);
    socket().receive({ type: "heartbeat", position: 20 });
    socket().receive({ type: "heartbeat", position: 20 });
    expect(seen.events).toEqual([14]);
    expect(seen.resets).toEqual([10]);
  });

  test("five silent seconds count as a dropped connection", () => {
    const made = link();
    connect(10);
    vi.advanceTimersByTime(4_900);
    expect(made.snapshot().phase).toBe("live");
    vi.advanceTimersByTime(200);
    expect(made.snapshot().phase).toBe("reconnecting");
    vi.advanceTimersByTime(600);
    expect(FakeSocket.opened).toHaveLength(2);
  });

  test("a refused session ends the link instead of retrying", () => {
    link();
    socket().accept();
    socket().drop(4401);
    vi.advanceTimersByTime(60_000);
    expect(seen.out).toBe(1);
    expect(FakeSocket.opened).toHaveLength(1);
  });

  test("nonsense from the server is ignored", () => {
    link();
    connect(10);
    socket().onmessage({ data: "{" });
    socket().receive({ type: "event", position: "many" });
    socket().receive({ type: "party" });
    expect(seen.events).toEqual([]);
  });
});

test("the badge shows the position, and a lost connection shows the banner", async () => {
  const harness = await open("/fleet");
  const socket = greet(harness);
  const badge = screen.getByRole("status", { name: "Live connection" });
  expect(badge.textContent).toMatch(/^live · position 30 · \d\.\d s$/);
  act(() => socket.drop());
  expect(badge.textContent).toBe("reconnecting");
  await screen.findByText(/cannot be reached; reconnecting/, {}, { timeout: 5_000 });
});

test("an event refetches the lists it changes, reading at its position or later", async () => {
  const harness = await open("/fleet");
  const socket = greet(harness);
  await screen.findByRole("article", { name: "Node n1" });
  harness.backend.state.nodes[0].status = "lost";
  const lost = harness.backend.append("node-n1", "NodeLost", {}, "controller");
  act(() => socket.receive(liveEvent(lost)));
  await screen.findByText("lost");
  const read = harness.backend.calls.findLast(({ path }) => path.endsWith("/nodes/"));
  expect(read?.query.min_position).toBe("31");
});

test("a burst of events refetches each list once", async () => {
  const harness = await open("/fleet");
  const socket = greet(harness);
  await screen.findByRole("article", { name: "Node n1" });
  const reads = () => harness.backend.calls.filter(({ path }) => path.endsWith("/nodes/")).length;
  await waitFor(() => expect(reads()).toBe(2));
  act(() => {
    for (let count = 0; count < 20; count++) {
      const { append } = harness.backend;
      socket.receive(liveEvent(append.call(harness.backend, "node-n1", "NodeLost", {}, "c")));
    }
  });
  await waitFor(() => expect(reads()).toBe(3));
  await new Promise((done) => setTimeout(done, 400));
  expect(reads()).toBe(3);
});

test("a counter that restarted gives no negative rate", () => {
  const at = (time: number, generated: number) => ({
    type: "telemetry" as const,
    node_id: "n1",
    at: time,
    devices: [],
    replicas: [{ replica_id: "r", generated_tokens: generated }] as never,
  });
  expect(tokenRate(undefined, at(1, 5))).toBeNull();
  expect(tokenRate(at(1, 100), at(3, 300))).toBe(100);
  expect(tokenRate(at(1, 100), at(3, 20))).toBe(0);
});
