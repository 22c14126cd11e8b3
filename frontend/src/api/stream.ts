/**
 * One generation over the gateway's websocket `/ws/v1/stream`.
 *
 * open -> auth(ticket) -> ready -> generate -> started -> delta* -> done. `stop()` sends cancel and
 * waits for the gateway's `done`, so that the shown usage is what is billed.
 */
import { z } from "zod";
import type { Ticket } from "./types";

export interface ChatMessage {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface ChatRequest {
  model: string;
  messages: ChatMessage[];
  max_tokens?: number;
  temperature?: number;
  top_p?: number;
  seed?: number;
}

const frame = z.discriminatedUnion("type", [
  z.object({ type: z.literal("ready") }),
  z.object({
    type: z.literal("started"),
    request_id: z.string(),
    version_id: z.string().catch(""),
    node: z.string().nullish(),
  }),
  z.object({ type: z.literal("delta"), text: z.string(), num_tokens: z.number().catch(1) }),
  z.object({
    type: z.literal("done"),
    finish_reason: z.string().nullish(),
    usage: z
      .object({ prompt_tokens: z.number().catch(0), completion_tokens: z.number().catch(0) })
      .catch({ prompt_tokens: 0, completion_tokens: 0 }),
    ttft_ms: z.number().nullish(),
    duration_ms: z.number().nullish(),
  }),
  z.object({
    type: z.literal("error"),
    error: z.object({ message: z.string(), code: z.string().nullish() }),
  }),
]);

export type StreamFrame = z.infer<typeof frame>;

export interface StreamHandlers {
  onFrame(frame: StreamFrame): void;
  /** The stream ended without `done` or `error`. */
  onClose(message: string): void;
}

export interface RunningStream {
  stop(): void;
}

const GENERATION = "a"; // one generation per connection here, so its id never varies

export function streamChat(
  ticket: Ticket,
  request: ChatRequest,
  handlers: StreamHandlers,
): RunningStream {
  const socket = new WebSocket(streamUrl(ticket.gateway_url));
  const send = (message: object) => socket.send(JSON.stringify(message));
  let ended = false;
  socket.onopen = () => send({ type: "auth", token: ticket.ticket });
  socket.onmessage = (message) => {
    const parsed = parseFrame(String(message.data));
    if (parsed === null) return;
    if (parsed.type === "ready") {
      send({ type: "generate", id: GENERATION, endpoint: "chat", request });
    }
    ended ||= parsed.type === "done" || parsed.type === "error";
    handlers.onFrame(parsed);
    if (ended) socket.close();
  };
  socket.onclose = (closing) => {
    if (!ended) handlers.onClose(closeMessage(closing.code, closing.reason));
  };
  return { stop: () => stop(socket, send) };
}

function stop(socket: WebSocket, send: (message: object) => void): void {
  if (socket.readyState === WebSocket.OPEN) send({ type: "cancel", id: GENERATION });
  else socket.close();
}

export function streamUrl(gatewayUrl: string): string {
  return `${gatewayUrl.replace(/^http/, "ws").replace(/\/$/, "")}/ws/v1/stream`;
}

function parseFrame(text: string): StreamFrame | null {
  try {
    const parsed = frame.safeParse(JSON.parse(text));
    return parsed.success ? parsed.data : null;
  } catch {
    return null;
  }
}

function closeMessage(code: number, reason: string): string {
  if (code === 4401) return "The gateway refused the ticket. Send again to get a fresh one.";
  if (code === 1006) return "The gateway cannot be reached, or it dropped the connection.";
  return reason || `The gateway closed the connection (code ${code}).`;
}
