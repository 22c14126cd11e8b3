/** The frames of `/ws/live`, checked at the boundary; an unknown frame is dropped. */
import { z } from "zod";
import type { LogEvent } from "./types";

const deviceLoad = z.object({
  index: z.number(),
  utilization: z.number().catch(0),
  memory_used_bytes: z.number().catch(0),
  memory_total_bytes: z.number().catch(0),
  foreign_bytes: z.number().catch(0),
  temperature_c: z.number().catch(0),
  power_w: z.number().catch(0),
});

const replicaLoad = z.object({
  replica_id: z.string(),
  version_id: z.string(),
  device_index: z.number(),
  state: z.string().catch(""),
  num_running: z.number().catch(0),
  num_waiting: z.number().catch(0),
  num_free_blocks: z.number().catch(0),
  num_blocks: z.number().catch(0),
  prefill_tokens_per_s: z.number().catch(0),
  decode_step_s: z.number().catch(0),
  generated_tokens: z.number().catch(0),
  cached_tokens: z.number().catch(0),
  prompt_tokens: z.number().catch(0),
  tier: z.string().catch(""),
  tier_since: z.number().catch(0),
});

const telemetry = z.object({
  type: z.literal("telemetry"),
  node_id: z.string(),
  at: z.number(),
  devices: z.array(deviceLoad).catch([]),
  replicas: z.array(replicaLoad).catch([]),
});

const event = z.looseObject({ type: z.literal("event") });
const logEvent = z.object({
  position: z.number(),
  stream: z.string(),
  version: z.number().catch(0),
  type: z.string(),
  data: z.record(z.string(), z.unknown()).catch({}),
  actor: z.string().catch(""),
  reason: z.string().catch(""),
  undoes: z.number().nullable().catch(null),
  recorded_at: z.number(),
  hash: z.string().catch(""),
});

const liveMessage = z.discriminatedUnion("type", [
  z.object({ type: z.literal("hello"), position: z.number() }),
  z.object({ type: z.literal("heartbeat"), position: z.number() }),
  z.object({ type: z.literal("reset"), position: z.number() }),
  telemetry,
]);

export type Telemetry = z.infer<typeof telemetry>;
export type DeviceLoad = z.infer<typeof deviceLoad>;
export type ReplicaLoad = z.infer<typeof replicaLoad>;
export type LiveMessage =
  | { type: "hello" | "heartbeat" | "reset"; position: number }
  | { type: "event"; event: LogEvent }
  | Telemetry;

export function parseLive(text: string): LiveMessage | null {
  const json = parseJson(text);
  if (event.safeParse(json).success) return parseEvent(json);
  const parsed = liveMessage.safeParse(json);
  return parsed.success ? parsed.data : null;
}

/** The frame's own `type` is "event", so the event's travels as `event_type`. */
function parseEvent(json: unknown): LiveMessage | null {
  const frame = json as Record<string, unknown>;
  const parsed = logEvent.safeParse({ ...frame, type: frame.event_type });
  return parsed.success ? { type: "event", event: parsed.data } : null;
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
