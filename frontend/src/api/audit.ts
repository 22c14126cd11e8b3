/** Who ordered what, what it changed, and what was refused. */
import { infiniteQueryOptions } from "@tanstack/react-query";
import { asOfQuery } from "./asOf";
import { body, client } from "./client";
import { nextQuery } from "./pages";
import type { AuditEntry, Page } from "./types";

export interface AuditFilters {
  q?: string;
  actor?: string;
  target?: string;
  outcome?: AuditEntry["outcome"];
}

type Cursor = Record<string, string | number> | null;

export function auditQuery(filters: AuditFilters) {
  return infiniteQueryOptions({
    queryKey: ["audit", filters],
    initialPageParam: null as Cursor,
    queryFn: ({ pageParam, meta }): Promise<Page<AuditEntry>> => {
      const query = { ...(pageParam ?? { ...filters, limit: 100 }), ...asOfQuery({ meta }) };
      return body(client.GET("/api/v1/audit/", { params: { query } }));
    },
    getNextPageParam: (page): Cursor => nextQuery(page.next),
  });
}
