import { Button } from "@mantine/core";
import { IconPlayerPause, IconPlayerPlay } from "@tabler/icons-react";
import { useInfiniteQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useState } from "react";
import { type EventFilters, eventsQuery } from "@/api/events";
import type { LogEvent } from "@/api/types";
import { Async } from "@/ui/Async";
import { Empty } from "@/ui/Empty";
import { integer } from "@/ui/format";
import { Page } from "@/ui/Page";
import { EventDrawer } from "./EventDrawer";
import { EventFilterBar } from "./EventFilterBar";
import { EventList } from "./EventList";
import { ProofSection } from "./ProofSection";

const route = getRouteApi("/app/events");

/** While paused, the rows stay as they were; the cache goes on collecting behind them. */
function usePause(rows: LogEvent[] | undefined) {
  const [frozen, setFrozen] = useState<LogEvent[] | null>(null);
  const missed = frozen && rows ? newerThan(rows, frozen[0]?.position ?? 0) : 0;
  const toggle = () => setFrozen((old) => (old ? null : (rows ?? [])));
  return { shown: frozen ?? rows, paused: frozen !== null, missed, toggle };
}

function newerThan(rows: LogEvent[], position: number): number {
  return rows.filter((row) => row.position > position).length;
}

export function EventsPage() {
  const { open, ...filters } = route.useSearch();
  return <FilteredEvents key={JSON.stringify(filters)} filters={filters} open={open} />;
}

function FilteredEvents({ filters, open }: { filters: EventFilters; open: number | undefined }) {
  const navigate = route.useNavigate();
  const events = useInfiniteQuery(eventsQuery(filters));
  const pause = usePause(events.data?.pages.flatMap((page) => page.results));
  const rows = pause.shown;
  const show = (position: number | undefined) =>
    navigate({ search: (old) => ({ ...old, open: position }) });
  return (
    <Page
      title="Events"
      sub="Everything that was decided and observed, newest first. The log only grows."
      actions={<PauseButton {...pause} />}
    >
      <ProofSection />
      <EventFilterBar
        filters={filters}
        onChange={(change) => navigate({ search: { ...filters, ...change }, replace: true })}
        count={rows && `${integer(rows.length)} loaded`}
      />
      <Async query={events}>
        {rows?.length === 0 && <NoEvents filtered={Object.values(filters).some(Boolean)} />}
        {rows && rows.length > 0 && (
          <EventList
            rows={rows}
            onOpen={(event) => show(event.position)}
            onEnd={() => events.hasNextPage && !events.isFetching && events.fetchNextPage()}
          />
        )}
      </Async>
      <EventDrawer
        position={open}
        known={rows?.find((event) => event.position === open)}
        onClose={() => show(undefined)}
      />
    </Page>
  );
}

function PauseButton(props: { paused: boolean; missed: number; toggle: () => void }) {
  const icon = props.paused ? <IconPlayerPlay size={14} /> : <IconPlayerPause size={14} />;
  const more = props.missed > 0 ? ` (${props.missed} new)` : "";
  return (
    <Button variant="default" leftSection={icon} onClick={props.toggle}>
      {props.paused ? `Resume${more}` : "Pause"}
    </Button>
  );
}

function NoEvents({ filtered }: { filtered: boolean }) {
  if (filtered) {
    return (
      <Empty title="No event matches">
        Clear a filter above. Streams are named after what they hold, for example{" "}
        <span className="mono">node-n1</span>, <span className="mono">model-smollm2</span> or{" "}
        <span className="mono">placement</span>.
      </Empty>
    );
  }
  return (
    <Empty title="The log is empty">
      Create a tenant or register a model; each writes an event.
    </Empty>
  );
}
