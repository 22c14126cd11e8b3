import { act, fireEvent, screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { dialog, greet, liveEvent, open, press, type } from "./harness";

const banner = () => screen.findByRole("status", { name: "As of" });
const address = () => window.location.pathname + window.location.search;
const reads = (
  backend: { calls: { path: string; query: Record<string, string> }[] },
  kind: string,
) =>
  backend.calls.filter(({ path }) => path === `/api/v1/${kind}/`).map(({ query }) => query.as_of);

/** Acme moves from standard to premium and initech comes, at positions 31 and 32. */
function change(backend: Awaited<ReturnType<typeof open>>["backend"]): void {
  const headers = { "x-csrftoken": "csrf-1" };
  const call = { query: {}, headers };
  backend.handle({
    ...call,
    method: "PATCH",
    path: "/api/v1/tenants/acme/",
    body: { tier: "free" },
  });
  const body = { name: "initech", tier: "standard" };
  backend.handle({ ...call, method: "POST", path: "/api/v1/tenants/", body });
}

test("each page shows what was, says so, and leads back to now", async () => {
  const { backend } = await open("/tenants?as_of=31", { prepare: change });
  const bar = await banner();
  await within(bar).findByText("31");
  await screen.findByRole("link", { name: "acme" });
  expect(screen.queryByRole("link", { name: "initech" })).toBeNull();
  for (const [name, kind] of [
    ["Fleet", "nodes"],
    ["Models", "models"],
    ["Routes", "routes"],
    ["Decisions", "decisions"],
    ["Events", "events"],
    ["Requests", "requests"],
  ] as const) {
    const before = reads(backend, kind).filter((asOf) => asOf === "31").length;
    fireEvent.click(screen.getByRole("link", { name }));
    await screen.findByRole("heading", { level: 1, name });
    await waitFor(() =>
      expect(reads(backend, kind).filter((asOf) => asOf === "31").length).toBeGreaterThan(before),
    );
    expect(new URLSearchParams(window.location.search).get("as_of")).toBe("31");
  }
  press("Back to live");
  fireEvent.click(screen.getByRole("link", { name: "Tenants" }));
  await screen.findByRole("link", { name: "initech" });
  expect(screen.queryByRole("status", { name: "As of" })).toBeNull();
  expect(address()).toBe("/tenants");
});

test("nothing can be changed in the past, and nothing live is mixed into it", async () => {
  const harness = await open("/tenants?as_of=30", { prepare: change });
  await screen.findByRole("link", { name: "acme" });
  expect(screen.queryByRole("button", { name: "Create tenant" })).toBeNull();
  expect(screen.queryByRole("link", { name: "initech" })).toBeNull();
  const socket = greet(harness);
  const pushed = harness.backend.append("tenant-acme", "TenantSuspended", {}, "user:ada");
  act(() => socket.receive(liveEvent(pushed)));
  await act(async () => await new Promise((done) => setTimeout(done, 400)));
  expect(screen.queryByRole("link", { name: "initech" })).toBeNull();
});

test("a position and a time can be chosen in the header", async () => {
  await open("/fleet");
  press("As of");
  const chooser = await screen.findByLabelText("Log position", { selector: "input" });
  fireEvent.change(chooser, { target: { value: "12" } });
  fireEvent.submit(chooser.closest("form") as HTMLFormElement);
  await banner();
  expect(address()).toBe("/fleet?as_of=12");
  press("One event later");
  await waitFor(() => expect(address()).toBe("/fleet?as_of=13"));
  press("As of");
  const time = await screen.findByLabelText("Time", { selector: "input" });
  fireEvent.change(time, { target: { value: "2026-01-31T12:00:00" } });
  fireEvent.submit(time.closest("form") as HTMLFormElement);
  await waitFor(() => {
    const chosen = new URLSearchParams(window.location.search).get("as_of") ?? "";
    expect(Date.parse(chosen)).toBe(new Date("2026-01-31T12:00:00").getTime());
  });
});

test("a moment that the log has not is said in the banner", async () => {
  await open("/fleet?as_of=9999");
  await within(await banner()).findByText(/no moment/);
});

test("a page of the present says that it is", async () => {
  await open("/settings?as_of=12");
  await within(await banner()).findByText(/always shows the present/);
});

test("an order is undone after a look at what that does", async () => {
  const { backend } = await open("/events?open=31", { prepare: change });
  press("Undo …", await dialog("Event 31"));
  const ask = await dialog("Undo event 31");
  await within(ask).findByText("Change tier");
  within(ask).getByText("would append TenantTierChanged");
  type("Reason", "wrong tenant", ask);
  press("Undo it", ask);
  await waitFor(() => expect(backend.state.events.at(-1)?.undoes).toBe(31));
  expect(backend.state.events.at(-1)?.data.reason).toBe("wrong tenant");
});

test("what cannot be undone says why", async () => {
  const { backend } = await open("/tenants", {
    prepare: (fake) => fake.append("tenant-acme", "ApiKeyRevoked", {}, "user:ada"),
  });
  fireEvent.click(screen.getByRole("link", { name: "Events" }));
  fireEvent.click(await screen.findByRole("button", { name: /Api key revoked|ApiKeyRevoked/i }));
  press("Undo …", await dialog(`Event ${backend.state.position}`));
  const ask = await dialog(`Undo event ${backend.state.position}`);
  await within(ask).findByText(/secret was erased/);
  expect(within(ask).getByRole("button", { name: "Undo it" })).toHaveProperty("disabled", true);
});

test("what a node reported has no undo", async () => {
  await open("/events?open=30");
  const drawer = await dialog("Event 30");
  await within(drawer).findByText("Stream");
  expect(within(drawer).queryByRole("button", { name: "Undo …" })).toBeNull();
});

test("a decision is recomputed on demand and says equal, or where it differs", async () => {
  await open("/decisions?open=d-2");
  fireEvent.click(await screen.findByRole("button", { name: "Recompute" }));
  await screen.findByText(/the same, bit for bit/);
});

test("a decision that this release makes otherwise shows each difference", async () => {
  await open("/decisions?open=d-3");
  fireEvent.click(await screen.findByRole("button", { name: "Recompute" }));
  const found = await screen.findByRole("list", { name: "Differences" });
  expect(found.textContent).toContain("started[0].candidates[0].score: 0.81 stored, 0.5 now");
});
