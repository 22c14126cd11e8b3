import { Button, Group, Text } from "@mantine/core";
import { IconPencil } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { lastChangeQuery, weightsQuery } from "@/api/routing";
import { useMayWrite } from "@/api/session";
import type { LogEvent, RoutingWeights } from "@/api/types";
import { UndoSection } from "@/pages/events/Undo";
import { Async } from "@/ui/Async";
import { Facts } from "@/ui/Facts";
import { Section } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Time } from "@/ui/Time";
import { WeightsModal } from "./WeightsModal";
import { isSame, LABELS, shown } from "./weights";

const ORDER: (keyof RoutingWeights)[] = [
  "alpha",
  "beta",
  "gamma",
  "prefix",
  "hop_s",
  "omega",
  "t_safe",
  "t_max",
  "stale_s",
];

/** By which weights gateways choose replicas, what differs from the defaults, and who changed it. */
export function RoutingSection() {
  const routing = useQuery(weightsQuery);
  const last = useQuery(lastChangeQuery).data;
  const writable = useMayWrite("routing");
  const [opened, setOpened] = useState(false);
  const found = routing.data?.value;
  return (
    <Section
      title="Routing"
      actions={found && writable && <ChangeButton onClick={() => setOpened(true)} />}
    >
      <Async query={routing}>
        {found && (
          <Facts
            items={ORDER.map((name) => [LABELS[name], told(name, found.weights, found.defaults)])}
          />
        )}
      </Async>
      <Text size="xs" c="dimmed" mt="xs">
        A replica costs α · latency + β · utilisation + γ · loading, and the cheapest gets the
        request. A change is in effect on every gateway at once.
      </Text>
      {last && <LastChange event={last} />}
      {routing.data && opened && (
        <WeightsModal known={routing.data} onClose={() => setOpened(false)} />
      )}
    </Section>
  );
}

function ChangeButton({ onClick }: { onClick: () => void }) {
  return (
    <Button variant="default" leftSection={<IconPencil size={14} />} onClick={onClick}>
      Change weights
    </Button>
  );
}

function LastChange({ event }: { event: LogEvent }) {
  return (
    <Group gap="sm" mt="sm">
      <Text size="sm">
        Last changed <Time at={event.recorded_at} /> by {event.actor}
        {event.reason && `: ${event.reason}`} (
        <RouterAnchor to="/events" search={{ open: event.position }}>
          event {event.position}
        </RouterAnchor>
        )
      </Text>
      <UndoSection event={event} />
    </Group>
  );
}

function told(name: keyof RoutingWeights, now: RoutingWeights, usual: RoutingWeights): string {
  const value = shown(name, now[name]);
  return isSame(now[name], usual[name])
    ? value
    : `${value}, by default ${shown(name, usual[name])}`;
}
