import { Drawer, Stack } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { eventQuery } from "@/api/events";
import type { LogEvent } from "@/api/types";
import { Async } from "@/ui/Async";
import { Facts } from "@/ui/Facts";
import { absolute, integer } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Json } from "@/ui/Json";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { UndoSection } from "./Undo";

interface EventDrawerProps {
  position: number | undefined;
  known: LogEvent | undefined;
  onClose: () => void;
}

/** The open event may not be among the loaded rows; then it is fetched by its position. */
export function EventDrawer({ position, known, onClose }: EventDrawerProps) {
  const wanted = position !== undefined && known === undefined;
  const fetched = useQuery({ ...eventQuery(position ?? 0), enabled: wanted });
  const event = known ?? fetched.data;
  return (
    <Drawer
      opened={position !== undefined}
      onClose={onClose}
      title={`Event ${integer(position ?? 0)}`}
    >
      <Async query={fetched}>{event && <EventDetail event={event} />}</Async>
    </Drawer>
  );
}

function undoes(position: number): [string, ReactNode] {
  const link = (
    <RouterAnchor key="undoes" to="/events" search={{ open: position }}>
      event {integer(position)}
    </RouterAnchor>
  );
  return ["Undoes", link];
}

function EventDetail({ event }: { event: LogEvent }) {
  const stream = (
    <RouterAnchor key="stream" to="/events" search={{ stream: event.stream }} className="mono">
      {event.stream}
    </RouterAnchor>
  );
  return (
    <Stack gap="md">
      <Facts
        items={[
          ["Type", event.type],
          ["Stream", stream],
          ["Version", integer(event.version)],
          ["Actor", event.actor || "–"],
          ["Reason", event.reason || "–"],
          ...(event.undoes === null ? [] : [undoes(event.undoes)]),
          ["Recorded", absolute(event.recorded_at)],
          ["Hash", <Id key="hash" value={event.hash} short={24} />],
        ]}
      />
      <Json value={event.data} label="event data" />
      <UndoSection event={event} />
    </Stack>
  );
}
