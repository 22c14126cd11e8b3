/** The whole application in jsdom, with fetch and WebSocket faked and nothing else. */
import { act, fireEvent, render, screen, within } from "@testing-library/react";
import { vi } from "vitest";
import { App } from "@/App";
import { forgetPosition } from "@/api/client";
import { FakeBackend } from "./fake/backend.mjs";
import { FakeSocket } from "./fake/sockets";

export interface Harness {
  backend: InstanceType<typeof FakeBackend>;
  live: () => FakeSocket;
}

async function serve(backend: Harness["backend"], request: Request): Promise<Response> {
  const url = new URL(request.url);
  const text = await request.text();
  const answer = backend.handle({
    method: request.method,
    path: url.pathname,
    query: Object.fromEntries(url.searchParams),
    headers: Object.fromEntries(request.headers),
    body: text ? JSON.parse(text) : undefined,
  });
  const body = answer.body === undefined ? null : JSON.stringify(answer.body);
  return new Response(body, { status: answer.status, headers: answer.headers });
}

export interface OpenOptions {
  role?: string;
  signedIn?: boolean;
  prepare?: (backend: Harness["backend"]) => void;
}

/** Open the dashboard at an address, signed in as an admin unless told otherwise. */
export async function open(path: string, options: OpenOptions = {}): Promise<Harness> {
  const backend = new FakeBackend();
  backend.user = options.signedIn === false ? null : "admin";
  backend.role = options.role ?? "admin";
  options.prepare?.(backend);
  FakeSocket.opened = [];
  forgetPosition();
  vi.stubGlobal("fetch", (request: Request) => serve(backend, request));
  vi.stubGlobal("WebSocket", FakeSocket);
  window.history.replaceState(null, "", path);
  render(<App />);
  await screen.findByRole("heading", { level: 1 });
  return { backend, live: () => FakeSocket.to("/ws/live") };
}

/** Let the live socket say hello at the backend's position. */
export function greet({ backend, live }: Harness): FakeSocket {
  const socket = live();
  act(() => {
    socket.accept();
    socket.receive({ type: "hello", position: backend.state.position, at: 0 });
  });
  return socket;
}

export function liveEvent(event: { type: string }): object {
  const { type, ...fields } = event;
  return { ...fields, type: "event", event_type: type };
}

export function type(label: string | RegExp, value: string, inside = screen.getByRole("dialog")) {
  const field = within(inside).getByLabelText(label, { selector: "input, textarea" });
  fireEvent.change(field, { target: { value } });
}

export function press(name: string | RegExp, inside: HTMLElement = document.body): void {
  fireEvent.click(within(inside).getByRole("button", { name }));
}

export async function dialog(name: string | RegExp): Promise<HTMLElement> {
  return await screen.findByRole("dialog", { name });
}

/** Pick an option of a select by what it says. */
export async function choose(label: string, option: string, inside: HTMLElement): Promise<void> {
  const inputs = within(inside).getAllByLabelText(label);
  fireEvent.click(inputs.find((each) => each.tagName === "INPUT") as HTMLElement);
  fireEvent.click(await screen.findByRole("option", { name: option, hidden: true }));
}
