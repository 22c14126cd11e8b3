import { z } from "zod";
import type { LogEvent } from "@/api/types";

const SHOWN = 3;
const LEFT_OUT = new Set(
  "type at name node_id tenant_id decision_id planned_from replica_id boot_id".split(" "),
);

/** What a list in an event is of: an arm, a placed replica, a version without a place, or a word. */
const itemSchema = z.union([
  z.string(),
  z.object({ version_id: z.string(), weight: z.number() }).transform(weighted),
  z.object({ assignment: z.object({ version_id: z.string() }) }).transform(placed),
  z.object({ version_id: z.string() }).transform(({ version_id }) => version_id),
]);

/** The event's most telling fields in one line; the drawer has all of them. */
export function gist(event: LogEvent): string {
  if (event.reason) return event.reason;
  if (!isObject(event.data)) return "";
  return Object.entries({ ...event.data, ...nested(event.data.spec) })
    .filter(([name]) => !LEFT_OUT.has(name))
    .map(([name, value]) => [name, told(value)])
    .filter(([, text]) => text !== "")
    .slice(0, SHOWN)
    .map(([name, text]) => `${name}=${text}`)
    .join("  ");
}

function told(value: unknown): string {
  if (Array.isArray(value)) return toldList(value);
  return ["string", "number", "boolean"].includes(typeof value) ? String(value) : "";
}

function toldList(items: unknown[]): string {
  const names = z.array(itemSchema).safeParse(items);
  if (names.success && names.data.length <= SHOWN) return names.data.join(", ");
  return String(items.length);
}

function weighted({ version_id, weight }: { version_id: string; weight: number }): string {
  return `${version_id}:${weight}`;
}

function placed({ assignment }: { assignment: { version_id: string } }): string {
  return assignment.version_id;
}

function nested(value: unknown): Record<string, unknown> {
  return isObject(value) ? value : {};
}

function isObject(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
