import type { LogEvent } from "@/api/types";

const SHOWN = 3;
const LEFT_OUT = new Set(["type", "at", "name", "node_id", "tenant_id"]);

/** The event's most telling plain fields in one line; the drawer has all of them. */
export function gist(event: LogEvent): string {
  if (event.reason) return event.reason;
  if (typeof event.data !== "object" || event.data === null) return "";
  return Object.entries(event.data)
    .filter(([name, value]) => !LEFT_OUT.has(name) && isPlain(value))
    .slice(0, SHOWN)
    .map(([name, value]) => `${name}=${value}`)
    .join("  ");
}

function isPlain(value: unknown): boolean {
  return ["string", "number", "boolean"].includes(typeof value) && value !== "";
}
