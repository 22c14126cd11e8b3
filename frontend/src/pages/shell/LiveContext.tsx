import { useQuery, useQueryClient } from "@tanstack/react-query";
import {
  createContext,
  type ReactNode,
  useContext,
  useEffect,
  useState,
  useSyncExternalStore,
} from "react";
import { notePosition } from "@/api/client";
import { Invalidator } from "@/api/invalidate";
import { LiveLink, type LiveState, liveUrl } from "@/api/live";
import { sessionQuery } from "@/api/session";
import { clearTelemetry, recordTelemetry } from "@/api/telemetry";

const LiveContext = createContext<LiveLink | null>(null);

/** Opens the page's one live connection and lets its events refresh the caches. */
export function LiveProvider({ children }: { children: ReactNode }) {
  const queries = useQueryClient();
  const [invalidator] = useState(() => new Invalidator(queries));
  const confined = Boolean(useQuery(sessionQuery).data?.tenant_id);
  const [link] = useState(
    () =>
      new LiveLink(
        liveUrl(),
        {
          onEvent: (event) => {
            notePosition(event.position);
            invalidator.apply(event);
          },
          onTelemetry: recordTelemetry,
          onReset: (position) => {
            notePosition(position);
            invalidator.everything();
          },
          onUnauthorized: () => queries.setQueryData(["session"], null),
        },
        !confined,
      ),
  );
  useEffect(() => {
    link.start();
    return () => {
      link.stop();
      invalidator.stop();
      clearTelemetry();
    };
  }, [link, invalidator]);
  return <LiveContext.Provider value={link}>{children}</LiveContext.Provider>;
}

export function useLive(): LiveState {
  const link = useContext(LiveContext);
  if (link === null) throw new Error("useLive needs a LiveProvider above it");
  return useSyncExternalStore(link.subscribe, link.snapshot);
}
