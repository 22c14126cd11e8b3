import { act, fireEvent, screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { asCurl, asOpenAiPython } from "@/api/snippets";
import { messagesOf, tokensPerSecond, ttft, turnsReducer } from "@/pages/playground/turns";
import type { FakeBackend } from "./fake/backend.mjs";
import { FakeSocket } from "./fake/sockets";
import { dialog, open, press } from "./harness";

async function ask(prompt: string): Promise<FakeSocket> {
  fireEvent.change(await screen.findByLabelText("Message"), { target: { value: prompt } });
  press("Send");
  await act(async () => await new Promise((done) => setTimeout(done, 30)));
  const socket = FakeSocket.to("/ws/v1/stream");
  act(() => {
    socket.accept();
    socket.receive({ type: "ready", tenant: "acme" });
    socket.receive({
      type: "started",
      id: "a",
      request_id: "req-1",
      version_id: "smollm2@v1",
      node: "n1",
    });
  });
  return socket;
}

const done = (finish_reason: string) => ({
  type: "done",
  id: "a",
  finish_reason,
  usage: { prompt_tokens: 9, completion_tokens: 2 },
});

test("a model that embeds is not offered: it does not talk", async () => {
  const embed = ({ state }: FakeBackend) => {
    for (const version of state.models[0].versions) version.task = "embed";
  };
  await open("/playground?tenant=acme", { prepare: embed });
  fireEvent.click(await screen.findByRole("combobox", { name: "Model" }));
  const offered = await screen.findAllByRole("option", { hidden: true });
  const names = offered.map((option) => option.textContent);
  expect(names).toContain("chat");
  expect(names).not.toContain("smollm2");
});

test("an answer streams in over the gateway's websocket with a ticket", async () => {
  const { backend } = await open("/playground?model=chat&tenant=acme&temperature=0");
  const socket = await ask("Hi");
  expect(socket.url).toBe("ws://gateway.test/ws/v1/stream");
  expect(backend.calls.findLast(({ method }) => method === "POST")?.body).toEqual({
    tenant: "acme",
  });
  expect(socket.sent[0]).toEqual({ type: "auth", token: "tkt_fake" });
  expect(socket.sent[1]).toMatchObject({
    type: "generate",
    endpoint: "chat",
    request: { model: "chat", temperature: 0, messages: [{ role: "user", content: "Hi" }] },
  });
  act(() => socket.receive({ type: "delta", id: "a", index: 0, text: "Hel", num_tokens: 1 }));
  act(() => socket.receive({ type: "delta", id: "a", index: 1, text: "lo", num_tokens: 1 }));
  const turn = screen.getByRole("article", { name: "Turn 1" });
  within(turn).getByText("Hello");
  expect(turn.getAttribute("aria-busy")).toBe("true");
  act(() => socket.receive(done("stop")));
  expect(turn.getAttribute("aria-busy")).toBe("false");
  expect(turn.textContent).toMatch(/TTFT \d/);
  expect(turn.textContent).toContain("2 tokens after 9 of prompt");
  expect(within(turn).getByRole("link", { name: "record" }).getAttribute("href")).toBe(
    "/requests?open=req-1",
  );
});

test("stop cancels the generation and waits for what is billed", async () => {
  await open("/playground");
  const socket = await ask("Count to a million");
  act(() => socket.receive({ type: "delta", id: "a", index: 0, text: "1", num_tokens: 1 }));
  press("Stop");
  expect(socket.sent.at(-1)).toEqual({ type: "cancel", id: "a" });
  act(() => socket.receive(done("cancelled")));
  within(screen.getByRole("article", { name: "Turn 1" })).getByText("stopped");
  screen.getByRole("button", { name: "Send" });
});

test("an error of the gateway is shown with the turn", async () => {
  await open("/playground");
  const socket = await ask("Hi");
  const error = {
    message: "The budget of acme is used up.",
    type: "x",
    code: "insufficient_quota",
  };
  act(() => socket.receive({ type: "error", id: "a", error }));
  expect(screen.getByRole("alert").textContent).toContain("The budget of acme is used up.");
});

test("a dropped gateway connection is said, not left hanging", async () => {
  await open("/playground");
  const socket = await ask("Hi");
  act(() => socket.drop(1006));
  expect(screen.getByRole("alert").textContent).toContain("The gateway cannot be reached");
  screen.getByRole("button", { name: "Send" });
});

test("the request is offered as curl and as openai-python", async () => {
  await open("/playground?model=chat");
  await screen.findByLabelText("Message");
  press("Copy as code");
  const box = await dialog("This request as code");
  expect(box.textContent).toContain("curl -N http://gateway.test/v1/chat/completions");
  fireEvent.click(within(box).getByRole("tab", { name: "openai-python" }));
  expect(box.textContent).toContain('base_url="http://gateway.test/v1"');
});

test("code survives quotes in the prompt and holds no key", () => {
  const messages = [{ role: "user" as const, content: 'It\'s "quoted"' }];
  const request = { model: "chat", messages, max_tokens: 8 };
  expect(asCurl("http://g", request)).toContain(`It'\\''s \\"quoted\\"`);
  expect(asOpenAiPython("http://g", request)).toContain("    max_tokens=8,");
  expect(asCurl("http://g", request)).not.toMatch(/sk_|tkt_/);
});

test("TTFT counts from sending, the rate from the first token on", () => {
  const delta = { type: "delta" as const, text: "x", num_tokens: 1 };
  let turns = turnsReducer([], { type: "sent", id: 1, prompt: "p", at: 1_000 });
  for (const at of [1_050, 1_150, 1_250]) {
    turns = turnsReducer(turns, { type: "frame", id: 1, frame: delta, at });
  }
  const turn = turns[0];
  if (!turn) throw new Error("no turn");
  expect(ttft(turn)).toBe(50);
  expect(tokensPerSecond(turn)).toBe(10);
  expect(messagesOf("be kind", turns, "next").map(({ role }) => role)).toEqual([
    "system",
    "user",
    "assistant",
    "user",
  ]);
});
