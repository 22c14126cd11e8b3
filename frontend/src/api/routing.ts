/** The weights by which gateways choose replicas. */
import { queryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client } from "./client";

export const weightsQuery = queryOptions({
  queryKey: ["routing", "weights"],
  queryFn: (asked) =>
    body(client.GET("/api/v1/routing/weights/", { params: { query: asOfQuery(asked) } })),
});
