/** Which cached lists an event changes; the rest of the cache stays as it is. */
import type { QueryClient } from "@tanstack/react-query";
import { prependEvent } from "./events";
import type { LogEvent } from "./types";

const BY_CATEGORY: Record<string, string[]> = {
  node: ["nodes", "placements", "models"],
  placement: ["placements", "decisions", "nodes", "models"],
  scaling: ["scalings", "preloads"],
  model: ["models", "routes"],
  route: ["routes"],
  tenant: ["tenants"],
  routing: ["routing"],
};

const FLUSH_MS = 250;

export function changedKeys(stream: string): string[] {
  const category = stream.split("-", 1)[0] ?? "";
  return BY_CATEGORY[category] ?? [];
}

/** Whether the event is of the admin audit; what agents report and planners decide is not. */
function isOrder({ actor }: LogEvent): boolean {
  return !actor.startsWith("system:");
}

/** Collects the keys of a burst of events and refetches each of them once. */
export class Invalidator {
  private pending = new Set<string>();
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly queries: QueryClient) {}

  apply(event: LogEvent): void {
    if (!prependEvent(this.queries, event)) this.pending.add("events");
    for (const key of changedKeys(event.stream)) this.pending.add(key);
    if (isOrder(event)) this.pending.add("audit");
    this.timer ??= setTimeout(() => this.flush(), FLUSH_MS);
  }

  everything(): void {
    void this.queries.invalidateQueries();
  }

  stop(): void {
    clearTimeout(this.timer);
  }

  private flush(): void {
    this.timer = undefined;
    for (const key of this.pending) void this.queries.invalidateQueries({ queryKey: [key] });
    this.pending.clear();
  }
}
