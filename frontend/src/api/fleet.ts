import { queryOptions, useQuery } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client, idempotencyKey } from "./client";
import { allRows } from "./pages";

export const nodesQuery = queryOptions({
  queryKey: ["nodes"],
  queryFn: (asked) =>
    allRows((query) =>
      body(client.GET("/api/v1/nodes/", { params: { query: { ...query, ...asOfQuery(asked) } } })),
    ),
});

export const placementsQuery = queryOptions({
  queryKey: ["placements"],
  queryFn: (asked) =>
    allRows((query) =>
      body(
        client.GET("/api/v1/placements/", { params: { query: { ...query, ...asOfQuery(asked) } } }),
      ),
    ),
});

export const statusQuery = queryOptions({
  queryKey: ["status"],
  queryFn: () => body(client.GET("/api/v1/status/")),
  refetchInterval: 5_000,
});

/** What prices and amounts are called; nothing is ever converted. */
export function useCurrency(): string {
  return useQuery(statusQuery).data?.currency ?? "";
}

export function drainNode(node_id: string, reason: string) {
  return body(
    client.POST("/api/v1/nodes/{node_id}/drain/", {
      params: { path: { node_id } },
      body: { reason },
      headers: idempotencyKey(),
    }),
  );
}

/** A DELETE has no body, so the reason travels as a header, which takes no letters beyond ASCII. */
export function removeNode(node_id: string, reason: string) {
  return body(
    client.DELETE("/api/v1/nodes/{node_id}/", {
      params: { path: { node_id } },
      headers: { ...idempotencyKey(), "X-Reason": encodeURIComponent(reason) },
    }),
  );
}

export function undrainNode(node_id: string, reason: string) {
  return body(
    client.POST("/api/v1/nodes/{node_id}/undrain/", {
      params: { path: { node_id } },
      body: { reason },
      headers: idempotencyKey(),
    }),
  );
}
