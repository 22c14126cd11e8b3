import { QueryClientProvider, useQueryClient } from "@tanstack/react-query";
import { getRouteApi, useLocation } from "@tanstack/react-router";
import { type ReactNode, useMemo } from "react";
import { AsOfProvider, type Moment, makePastClient } from "@/api/asOf";

const app = getRouteApi("/app");

/** What cannot be turned back: a conversation happens now, and settings are those of now. */
const NOW_ONLY = /^\/(playground|settings|usage)/;

/** The moment in the address; undefined: now. */
export function useMoment(): Moment | undefined {
  return app.useSearch().as_of;
}

export function useHonoursMoment(): boolean {
  return !NOW_ONLY.test(useLocation().pathname);
}

/** Shows the pages below as of the moment in the address, from a cache of its own. */
export function Past({ children }: { children: ReactNode }) {
  const asOf = useMoment();
  const honoured = useHonoursMoment();
  const live = useQueryClient();
  const past = useMemo(
    () => (asOf === undefined ? live : makePastClient(asOf, live)),
    [asOf, live],
  );
  if (asOf === undefined || !honoured) return children;
  return (
    <QueryClientProvider client={past} key={String(asOf)}>
      <AsOfProvider value={asOf}>{children}</AsOfProvider>
    </QueryClientProvider>
  );
}

/** Go to a moment, or back to now, and stay on the page. */
export function useGoTo(): (asOf: Moment | undefined) => void {
  const navigate = app.useNavigate();
  return (as_of) => void navigate({ to: ".", search: (old) => ({ ...old, as_of }) });
}
