import {
  type InfiniteData,
  infiniteQueryOptions,
  type QueryClient,
  queryOptions,
} from "@tanstack/react-query";
import { asOfQuery, type Moment } from "./asOf";
import { body, client, idempotencyKey, ifMatch } from "./client";
import { nextQuery } from "./pages";
import type { LogEvent, Page } from "./types";

export interface EventFilters {
  stream?: string;
  type?: string;
  actor?: string;
}

type Cursor = Record<string, string | number> | null;
type EventPages = InfiniteData<Page<LogEvent>, Cursor>;

const LIMIT = 100;
const KEPT = 5_000;

/** The log, newest first, page by page. */
export function eventsQuery(filters: EventFilters) {
  return infiniteQueryOptions({
    queryKey: ["events", present(filters)],
    initialPageParam: null as Cursor,
    queryFn: ({ pageParam, meta }): Promise<Page<LogEvent>> => {
      const first = { ...present(filters), order: "desc" as const, limit: LIMIT };
      const query = { ...(pageParam ?? first), ...asOfQuery({ meta }) };
      return body(client.GET("/api/v1/events/", { params: { query } }));
    },
    getNextPageParam: (page): Cursor => nextQuery(page.next),
    staleTime: Number.POSITIVE_INFINITY, // the live link keeps it current
    structuralSharing: false, // events never change, and comparing thousands per event is slow
  });
}

function present(filters: EventFilters): Record<string, string> {
  const given = Object.entries(filters).filter(([, value]) => value);
  return Object.fromEntries(given) as Record<string, string>;
}

export function matches(event: LogEvent, filters: EventFilters): boolean {
  if (filters.stream && event.stream !== filters.stream) return false;
  if (filters.type && event.type !== filters.type) return false;
  return !filters.actor || event.actor === filters.actor;
}

/**
 * Put a live event on top of every cached event list whose filters it passes. False if one of them
 * is being fetched: the answer may be older than the event and would take it away again.
 */
export function prependEvent(queries: QueryClient, event: LogEvent): boolean {
  let settled = true;
  for (const query of queries.getQueryCache().findAll({ queryKey: ["events"] })) {
    if (!matches(event, query.queryKey[1] as EventFilters)) continue;
    settled &&= query.state.fetchStatus === "idle";
    queries.setQueryData<EventPages>(query.queryKey, (data) => data && withEvent(data, event));
  }
  return settled;
}

export function withEvent(data: EventPages, event: LogEvent): EventPages {
  const [first, ...rest] = data.pages;
  if (!first || (first.results[0]?.position ?? 0) >= event.position) return data;
  const results = [event, ...first.results].slice(0, KEPT);
  return { ...data, pages: [{ ...first, results }, ...rest] };
}

/** One event by its position; null if the log has none there. */
export function eventQuery(position: number) {
  const query = { after: position - 1, limit: 1 };
  return queryOptions({
    queryKey: ["event", position],
    queryFn: async (): Promise<LogEvent | null> => {
      const page: Page<LogEvent> = await body(client.GET("/api/v1/events/", { params: { query } }));
      return page.results[0] ?? null;
    },
    staleTime: Number.POSITIVE_INFINITY, // an event never changes
  });
}

/** The last event at or before a moment; null before the first one. */
export function lastEventQuery(asOf: Moment) {
  const query = { as_of: String(asOf), order: "desc" as const, limit: 1 };
  return queryOptions({
    queryKey: ["event", "last", asOf],
    queryFn: async (): Promise<LogEvent | null> => {
      const page: Page<LogEvent> = await body(client.GET("/api/v1/events/", { params: { query } }));
      return page.results[0] ?? null;
    },
  });
}

/** What taking an event back would do; the refusal says why it cannot be done. */
export function undoPreviewQuery(position: number) {
  const params = { path: { position }, query: { dry_run: true } };
  return queryOptions({
    queryKey: ["undo", position],
    queryFn: () => body(client.POST("/api/v1/events/{position}/undo/", { params, body: {} })),
    gcTime: 0, // what it would do depends on what happens meanwhile
    retry: false,
  });
}

/** `version`: of the aggregate as the preview saw it. */
export function undoEvent(position: number, version: number, reason: string) {
  const order = {
    params: { path: { position } },
    body: reason ? { reason } : {},
    headers: { ...idempotencyKey(), ...ifMatch(`"${version}"`) },
  };
  return body(client.POST("/api/v1/events/{position}/undo/", order));
}
