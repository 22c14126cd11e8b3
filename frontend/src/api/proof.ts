import { queryOptions } from "@tanstack/react-query";
import { body, client } from "./client";
import type { Checkpoint, Page, Verification } from "./types";

export type SealedLog = "events" | "requests";

/** The newest checkpoint of a log; null while nothing of it is sealed. */
export function checkpointQuery(log: SealedLog) {
  const query = { log, order: "desc" as const, limit: 1 };
  return queryOptions({
    queryKey: ["checkpoint", log],
    queryFn: async (): Promise<Checkpoint | null> => {
      const page: Page<Checkpoint> = await body(
        client.GET("/api/v1/checkpoints/", { params: { query } }),
      );
      return page.results[0] ?? null;
    },
    refetchInterval: 15_000,
  });
}

/** The last verification of everything stored; asked often while one runs. */
export const verificationQuery = queryOptions({
  queryKey: ["verification"],
  queryFn: (): Promise<Verification> => body(client.GET("/api/v1/verification/")),
  refetchInterval: (query) => (query.state.data?.running ? 1_000 : 60_000),
});

export function startVerification(): Promise<Verification> {
  return body(client.POST("/api/v1/verification/"));
}
