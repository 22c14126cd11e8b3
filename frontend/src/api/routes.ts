import { queryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client, idempotencyKey, ifMatch, tagged } from "./client";
import { allRows } from "./pages";
import type { Arm, RouteOrder } from "./types";

export const routesQuery = queryOptions({
  queryKey: ["routes"],
  queryFn: (asked) =>
    allRows((query) =>
      body(client.GET("/api/v1/routes/", { params: { query: { ...query, ...asOfQuery(asked) } } })),
    ),
});

export function routeQuery(name: string) {
  return queryOptions({
    queryKey: ["routes", name],
    queryFn: (asked) =>
      tagged(
        client.GET("/api/v1/routes/{name}/", {
          params: { path: { name }, query: asOfQuery(asked) },
        }),
      ),
  });
}

export function createRoute(route: RouteOrder) {
  return body(client.POST("/api/v1/routes/", { body: route, headers: idempotencyKey() }));
}

export function changeRoute({ name, ...change }: RouteOrder, etag: string) {
  return body(
    client.PUT("/api/v1/routes/{name}/", {
      params: { path: { name } },
      body: change,
      headers: { ...idempotencyKey(), ...ifMatch(etag) },
    }),
  );
}

export function deleteRoute(name: string) {
  return body(
    client.DELETE("/api/v1/routes/{name}/", {
      params: { path: { name } },
      headers: idempotencyKey(),
    }),
  );
}

/** The part of the traffic an arm gets, 0 to 1: its weight over the sum of all weights. */
export function shareOf(arm: Arm, arms: Arm[]): number {
  const total = arms.reduce((sum, each) => sum + positive(each.weight), 0);
  return total > 0 ? positive(arm.weight) / total : 0;
}

function positive(weight: number): number {
  return Number.isFinite(weight) && weight > 0 ? weight : 0;
}
