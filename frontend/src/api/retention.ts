/** How long what is kept. */
import { queryOptions } from "@tanstack/react-query";
import { body, client } from "./client";

export const retentionQuery = queryOptions({
  queryKey: ["retention"],
  queryFn: async () => (await body(client.GET("/api/v1/retention/"))).results,
});
