import { queryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client, idempotencyKey, ifMatch, tagged } from "./client";
import { allRows } from "./pages";
import type { Access, NewVersion, Price } from "./types";

export const modelsQuery = queryOptions({
  queryKey: ["models"],
  queryFn: (asked) =>
    allRows((query) =>
      body(client.GET("/api/v1/models/", { params: { query: { ...query, ...asOfQuery(asked) } } })),
    ),
});

export function modelQuery(name: string) {
  return queryOptions({
    queryKey: ["models", name],
    queryFn: (asked) =>
      tagged(
        client.GET("/api/v1/models/{name}/", {
          params: { path: { name }, query: asOfQuery(asked) },
        }),
      ),
  });
}

export function registerModel(name: string) {
  return body(client.POST("/api/v1/models/", { body: { name }, headers: idempotencyKey() }));
}

export function addVersion(name: string, spec: NewVersion) {
  return body(
    client.POST("/api/v1/models/{name}/versions/", {
      params: { path: { name } },
      body: spec,
      headers: idempotencyKey(),
    }),
  );
}

interface VersionOrder {
  name: string;
  version: string;
  etag: string;
}

function versionCall({ name, version, etag }: VersionOrder) {
  return {
    params: { path: { name, version } },
    headers: { ...idempotencyKey(), ...ifMatch(etag) },
  };
}

export function scaleVersion(order: VersionOrder, min_replicas: number, max_replicas: number) {
  const scale = { ...versionCall(order), body: { min_replicas, max_replicas } };
  return body(client.POST("/api/v1/models/{name}/versions/{version}/scale/", scale));
}

export function setPrice(order: VersionOrder, price: Price) {
  const set = { ...versionCall(order), body: price };
  return body(client.PUT("/api/v1/models/{name}/versions/{version}/price/", set));
}

export function retireVersion(order: VersionOrder, reason: string) {
  const retire = { ...versionCall(order), body: { reason } };
  return body(client.POST("/api/v1/models/{name}/versions/{version}/retire/", retire));
}

export function makeDefault(order: VersionOrder, reason: string) {
  const set = { ...versionCall(order), body: { reason } };
  return body(client.POST("/api/v1/models/{name}/versions/{version}/default/", set));
}

export function addAlias(name: string, alias: string) {
  return body(
    client.POST("/api/v1/models/{name}/aliases/", {
      params: { path: { name } },
      body: { alias },
      headers: idempotencyKey(),
    }),
  );
}

export function removeAlias(name: string, alias: string) {
  return body(
    client.DELETE("/api/v1/models/{name}/aliases/{alias}/", {
      params: { path: { name, alias } },
      headers: idempotencyKey(),
    }),
  );
}

export function setAccess(name: string, access: Access, etag: string) {
  return body(
    client.PUT("/api/v1/models/{name}/access/", {
      params: { path: { name } },
      body: access,
      headers: { ...idempotencyKey(), ...ifMatch(etag) },
    }),
  );
}
