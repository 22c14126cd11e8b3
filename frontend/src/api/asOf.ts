/**
 * Looking at the past: `?as_of=` of every read, and a cache of its own.
 *
 * What was is kept in a QueryClient of its own, made for one moment: no live event refreshes it, and
 * nothing of it is ever taken for what is now. Its queries carry the moment as their `meta`.
 */
import { QueryClient } from "@tanstack/react-query";
import { createContext, useContext } from "react";

/** A log position, or an ISO 8601 time. */
export type Moment = number | string;

interface Asked {
  meta?: Record<string, unknown> | undefined;
}

/**
 * The query parameter of a read, from what its query function is given. (Not named "then": a module
 * that exports one is a promise to whoever imports it dynamically, and never resolves.)
 */
export function asOfQuery({ meta }: Asked): { as_of?: string } {
  return meta?.asOf === undefined ? {} : { as_of: String(meta.asOf) };
}

export function makePastClient(asOf: Moment, live: QueryClient): QueryClient {
  const { queries } = live.getDefaultOptions();
  const client = new QueryClient({
    defaultOptions: {
      queries: { ...queries, meta: { asOf }, staleTime: Number.POSITIVE_INFINITY },
    },
  });
  client.setQueryData(["session"], live.getQueryData(["session"]));
  return client;
}

const AsOfContext = createContext<Moment | undefined>(undefined);
export const AsOfProvider = AsOfContext.Provider;

/** The moment that is shown below here; undefined: now. */
export function useAsOf(): Moment | undefined {
  return useContext(AsOfContext);
}
