import type { ReactNode } from "react";
import { ProblemAlert } from "./ProblemAlert";

interface Loadable {
  error: unknown;
  data: unknown;
  refetch: () => unknown;
}

/** Shows a query's problem; keeps showing its last good data above a failed refresh. */
export function Async({ query, children }: { query: Loadable; children: ReactNode }) {
  const failed = query.error != null;
  return (
    <>
      {failed && <ProblemAlert error={query.error} onRetry={() => query.refetch()} />}
      {(!failed || query.data !== undefined) && children}
    </>
  );
}
