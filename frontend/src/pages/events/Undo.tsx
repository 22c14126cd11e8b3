import { Button, Text, TextInput } from "@mantine/core";
import { IconArrowBackUp } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { undoEvent, undoPreviewQuery } from "@/api/events";
import { changedKeys } from "@/api/invalidate";
import { type Resource, useMayWrite } from "@/api/session";
import type { LogEvent, UndoPreview } from "@/api/types";
import { FormModal } from "@/ui/FormModal";
import { integer, words } from "@/ui/format";
import { Json } from "@/ui/Json";
import { ProblemAlert } from "@/ui/ProblemAlert";

const RESOURCES: Record<string, Resource> = {
  TenantBudgetSet: "budget",
  ApiKeyIssued: "key",
  ApiKeyRevoked: "key",
};
const CATEGORIES: Record<string, Resource> = {
  tenant: "tenant",
  model: "model",
  route: "route",
  node: "node",
  routing: "routing",
};

/** What somebody ordered can be taken back; what nodes report and planners decide cannot. */
function resourceOf({ stream, type }: LogEvent): Resource | undefined {
  const category = stream.split("-", 1)[0] ?? "";
  if (category === "node" && !type.startsWith("NodeDrain")) return undefined;
  return RESOURCES[type] ?? CATEGORIES[category];
}

export function UndoSection({ event }: { event: LogEvent }) {
  const resource = resourceOf(event);
  const writable = useMayWrite(resource ?? "tenant");
  const [opened, setOpened] = useState(false);
  if (resource === undefined || !writable) return null;
  return (
    <div>
      <Button
        variant="default"
        leftSection={<IconArrowBackUp size={14} />}
        onClick={() => setOpened(true)}
      >
        Undo …
      </Button>
      {opened && <UndoModal event={event} onClose={() => setOpened(false)} />}
    </div>
  );
}

function UndoModal({ event, onClose }: { event: LogEvent; onClose: () => void }) {
  const { position, stream, type } = event;
  const preview = useQuery(undoPreviewQuery(position));
  const [reason, setReason] = useState("");
  const plan = preview.data;
  return (
    <FormModal
      title={`Undo event ${integer(position)}`}
      opened
      onClose={onClose}
      submitLabel="Undo it"
      disabled={!plan?.changed}
      done={`${words(type)} is undone`}
      touches={["events", ...changedKeys(stream)]}
      submit={() => undoEvent(position, plan ? seenVersion(plan) : 0, reason)}
    >
      {preview.isError && <ProblemAlert error={preview.error} />}
      {preview.isPending && <Text size="sm">Working out what it would do …</Text>}
      {plan && <Preview plan={plan} />}
      {plan?.changed && (
        <TextInput
          label="Reason"
          description="Optional. Kept in the event log."
          value={reason}
          onChange={(change) => setReason(change.currentTarget.value)}
        />
      )}
    </FormModal>
  );
}

/** A preview names the version that there would be. */
function seenVersion({ version, events }: UndoPreview): number {
  return version - events.length;
}

function Preview({ plan }: { plan: UndoPreview }) {
  if (!plan.changed) return <Text size="sm">It is so already: nothing would change.</Text>;
  return (
    <>
      <Text size="sm">
        Nothing is erased: this order is given, and the log shows that it undoes event{" "}
        {integer(plan.undoes)}.
      </Text>
      {plan.commands.map((command) => (
        <div key={command.type}>
          <Text size="sm" fw={600}>
            {words(command.type)}
          </Text>
          <Json value={command.data} label={`order ${command.type}`} />
        </div>
      ))}
      {plan.events.map((event) => (
        <div key={event.type}>
          <Text size="sm" c="dimmed">
            would append {event.type}
          </Text>
          <Json value={event.data} label={`event ${event.type}`} />
        </div>
      ))}
    </>
  );
}
