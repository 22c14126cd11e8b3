/** How many replicas the load asked for, and what became of models that were loaded ahead. */
import { queryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client } from "./client";
import { allRows } from "./pages";

const SHOWN = 20;

export const scalingsQuery = queryOptions({
  queryKey: ["scalings"],
  queryFn: (asked) => {
    const query = { limit: SHOWN, ...asOfQuery(asked) };
    return body(client.GET("/api/v1/scalings/", { params: { query } }));
  },
});

export const preloadTotalsQuery = queryOptions({
  queryKey: ["preloads"],
  queryFn: (asked) =>
    allRows((query) =>
      body(
        client.GET("/api/v1/preloads/totals/", {
          params: { query: { ...query, ...asOfQuery(asked) } },
        }),
      ),
    ),
});
