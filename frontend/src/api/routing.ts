/** The weights by which gateways choose replicas. */
import { queryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client, idempotencyKey, ifMatch, tagged } from "./client";
import type { LogEvent, RoutingWeights } from "./types";

const STREAM = "routing-weights";

/** With the ETag that a change sends back. */
export const weightsQuery = queryOptions({
  queryKey: ["routing", "weights"],
  queryFn: (asked) =>
    tagged(client.GET("/api/v1/routing/weights/", { params: { query: asOfQuery(asked) } })),
});

/** The event that set them last; null while they are the defaults that nobody has changed. */
export const lastChangeQuery = queryOptions({
  queryKey: ["routing", "last change"],
  queryFn: async (asked): Promise<LogEvent | null> => {
    const query = { stream: STREAM, order: "desc" as const, limit: 1, ...asOfQuery(asked) };
    const page = await body(client.GET("/api/v1/events/", { params: { query } }));
    return page.results[0] ?? null;
  },
});

export type WeightChanges = Partial<RoutingWeights>;

/** What a change would do; a refusal names the weight. `etag`: of the weights it starts from. */
export function weightsPreviewQuery(changes: WeightChanges, etag: string) {
  return queryOptions({
    queryKey: ["preview of routing", etag, changes], // a change of routing asks it no more
    queryFn: () =>
      body(
        client.PATCH("/api/v1/routing/weights/", {
          params: { query: { dry_run: true } },
          body: changes,
          headers: ifMatch(etag),
        }),
      ),
    gcTime: 0,
    retry: false,
  });
}

export function changeWeights(changes: WeightChanges, etag: string, reason: string) {
  return body(
    client.PATCH("/api/v1/routing/weights/", {
      body: reason ? { ...changes, reason } : changes,
      headers: { ...idempotencyKey(), ...ifMatch(etag) },
    }),
  );
}
