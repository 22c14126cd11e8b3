/** What was decided and what was served: placement decisions and the request ledger. */
import { infiniteQueryOptions, queryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client } from "./client";
import { nextQuery } from "./pages";
import type { Decision, Page, RequestRecord } from "./types";

type Cursor = Record<string, string | number> | null;

export const decisionsQuery = infiniteQueryOptions({
  queryKey: ["decisions"],
  initialPageParam: null as Cursor,
  queryFn: ({ pageParam, meta }): Promise<Page<Decision>> => {
    const query = { ...(pageParam ?? { limit: 50 }), ...asOfQuery({ meta }) };
    return body(client.GET("/api/v1/decisions/", { params: { query } }));
  },
  getNextPageParam: (page): Cursor => nextQuery(page.next),
});

export function decisionQuery(decision_id: string) {
  const path = { decision_id };
  return queryOptions({
    queryKey: ["decisions", decision_id],
    queryFn: (asked) =>
      body(
        client.GET("/api/v1/decisions/{decision_id}/", {
          params: { path, query: asOfQuery(asked) },
        }),
      ),
    staleTime: Number.POSITIVE_INFINITY, // a decision never changes
  });
}

/** The decision made again from what the planner saw then. */
export function replayQuery(decision_id: string) {
  const params = { path: { decision_id } };
  return queryOptions({
    queryKey: ["replay", decision_id],
    queryFn: () => body(client.GET("/api/v1/decisions/{decision_id}/replay/", { params })),
    staleTime: Number.POSITIVE_INFINITY,
  });
}

export interface RequestFilters {
  request_id?: string;
  tenant?: string;
  model?: string;
  outcome?: string;
}

export function requestsQuery(filters: RequestFilters) {
  return infiniteQueryOptions({
    queryKey: ["requests", filters],
    initialPageParam: null as Cursor,
    queryFn: ({ pageParam, meta }): Promise<Page<RequestRecord>> => {
      const query = { ...(pageParam ?? { ...filters, limit: 100 }), ...asOfQuery({ meta }) };
      return body(client.GET("/api/v1/requests/", { params: { query } }));
    },
    getNextPageParam: (page): Cursor => nextQuery(page.next),
    refetchInterval: 5_000, // the ledger is not part of the event log, so nothing pushes it
  });
}

/** Every try of a request on a replica; an ended request's never change. */
export function attemptsQuery(request_id: string) {
  const params = { path: { request_id } };
  return queryOptions({
    queryKey: ["requests", "one", request_id, "attempts"],
    queryFn: () => body(client.GET("/api/v1/requests/{request_id}/attempts/", { params })),
  });
}

/** Why each attempt of a request went where it went, where that was kept. */
export function dispatchQuery(request_id: string) {
  const path = { request_id };
  return queryOptions({
    queryKey: ["requests", "one", request_id, "dispatch"],
    queryFn: (asked) =>
      body(
        client.GET("/api/v1/requests/{request_id}/dispatch/", {
          params: { path, query: asOfQuery(asked) },
        }),
      ),
  });
}

export function requestQuery(request_id: string) {
  const path = { request_id };
  return queryOptions({
    queryKey: ["requests", "one", request_id],
    queryFn: (asked) =>
      body(
        client.GET("/api/v1/requests/{request_id}/", { params: { path, query: asOfQuery(asked) } }),
      ),
  });
}
