/** What was used: sums over the request records, and the check that they are right. */
import { queryOptions } from "@tanstack/react-query";
import { body, client } from "./client";

export const GROUPS = ["day", "tenant", "key", "user", "model", "version", "arm", "hour"] as const;
export type Group = (typeof GROUPS)[number];

export interface UsageQuestion {
  group: Group;
  days: number;
  tenant?: string;
}

/** Midnight of the first of the last `days` days where the viewer is; today is one of them. */
export function startOf(days: number, now: Date): Date {
  return new Date(now.getFullYear(), now.getMonth(), now.getDate() - days + 1);
}

export function usageQuery({ group, days, tenant }: UsageQuestion) {
  return queryOptions({
    queryKey: ["usage", group, days, tenant],
    queryFn: () => {
      const since = startOf(days, new Date()).toISOString();
      const group_by = group === "arm" ? "route,arm" : group;
      const query = { group_by, since, tenant, limit: 200 };
      return body(client.GET("/api/v1/usage/", { params: { query } }));
    },
    refetchInterval: 10_000, // the ledger is not part of the event log, so nothing pushes it
  });
}

export const usageCheckQuery = queryOptions({
  queryKey: ["usage", "check"],
  queryFn: () => body(client.GET("/api/v1/usage/check/")),
  refetchInterval: 60_000,
});
