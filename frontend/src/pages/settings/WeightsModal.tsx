import { Alert, Button, Fieldset, NumberInput, SimpleGrid, Text, TextInput } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import type { Tagged } from "@/api/client";
import { changeWeights, type WeightChanges, weightsPreviewQuery } from "@/api/routing";
import type { Routing, RoutingWeights } from "@/api/types";
import { FormModal } from "@/ui/FormModal";
import { plural } from "@/ui/format";
import { ProblemAlert } from "@/ui/ProblemAlert";
import { changesOf, isSame, LABELS, OMEGAS, SCALARS, shown } from "./weights";

const PAUSE_MS = 300;

interface WeightsModalProps {
  known: Tagged<Routing>;
  onClose: () => void;
}

/** It keeps to the weights that it was opened with, and says so if somebody changes them. */
export function WeightsModal({ known, onClose }: WeightsModalProps) {
  const [{ value, etag }, setBase] = useState(known);
  const [wanted, setWanted] = useState(value.weights);
  const [reason, setReason] = useState("");
  const preview = usePreview(wanted, value.weights, etag);
  const changes = changesOf(wanted, value.weights);
  return (
    <FormModal
      title="Change the routing weights"
      opened
      onClose={onClose}
      size="lg"
      submitLabel="Change weights"
      disabled={!preview.isSure}
      submit={() => changeWeights(changes, etag, reason)}
      done={`${plural(Object.keys(changes).length, "weight")} changed`}
      touches={["routing", "events"]}
    >
      {known.etag !== etag && (
        <Overtaken
          startAgain={() => {
            setBase(known);
            setWanted(known.value.weights);
          }}
        />
      )}
      <Fields
        weights={wanted}
        change={(part) => setWanted((old) => ({ ...old, ...part }))}
        reset={() => setWanted(value.defaults)}
        isUsual={Object.keys(changesOf(wanted, value.defaults)).length === 0}
      />
      <Preview now={value.weights} changes={changes} preview={preview} />
      <TextInput
        label="Reason"
        description="Optional. Kept in the event log."
        value={reason}
        onChange={(event) => setReason(event.currentTarget.value)}
      />
    </FormModal>
  );
}

function Overtaken({ startAgain }: { startAgain: () => void }) {
  return (
    <Alert color="yellow" variant="light" title="The weights were changed meanwhile">
      <Button variant="default" onClick={startAgain}>
        Start from what they are now
      </Button>
    </Alert>
  );
}

interface Previewed {
  error: Error | null;
  /** The server has said what exactly these changes would do, and they would do something. */
  isSure: boolean;
}

/** A dry run of the change, once nobody has typed for a moment. */
function usePreview(wanted: RoutingWeights, now: RoutingWeights, etag: string): Previewed {
  const [settled] = useDebouncedValue(wanted, PAUSE_MS);
  const changes = changesOf(settled, now);
  const enabled = Object.keys(changes).length > 0;
  const asked = useQuery({ ...weightsPreviewQuery(changes, etag), enabled });
  const isSure = enabled && settled === wanted && asked.data?.changed === true;
  return { error: enabled ? asked.error : null, isSure };
}

interface FieldsProps {
  weights: RoutingWeights;
  change: (part: WeightChanges) => void;
  reset: () => void;
  isUsual: boolean;
}

function Fields({ weights, change, reset, isUsual }: FieldsProps) {
  return (
    <>
      <SimpleGrid cols={{ base: 1, xs: 2 }} spacing="sm">
        {SCALARS.map(({ name, label, help, unit, step, max }) => (
          <NumberInput
            key={name}
            label={label}
            description={help}
            suffix={unit}
            min={0}
            max={max}
            clampBehavior="none"
            step={step}
            value={weights[name]}
            onChange={(typed) => change({ [name]: Number(typed) })}
          />
        ))}
      </SimpleGrid>
      <Omegas omega={weights.omega} change={(omega) => change({ omega })} />
      <Button
        variant="subtle"
        disabled={isUsual}
        onClick={reset}
        style={{ alignSelf: "flex-start" }}
      >
        Fill in the defaults
      </Button>
    </>
  );
}

function Omegas(props: { omega: number[]; change: (omega: number[]) => void }) {
  const { omega, change } = props;
  return (
    <Fieldset legend="ω, health: decides between equal costs; the four sum to 1">
      <SimpleGrid cols={4} spacing="sm">
        {OMEGAS.map((label, at) => (
          <NumberInput
            key={label}
            label={label}
            min={0}
            max={1}
            clampBehavior="none"
            step={0.05}
            value={omega[at] ?? 0}
            onChange={(typed) => change(omega.map((old, i) => (i === at ? Number(typed) : old)))}
          />
        ))}
      </SimpleGrid>
    </Fieldset>
  );
}

interface PreviewProps {
  now: RoutingWeights;
  changes: WeightChanges;
  preview: Previewed;
}

function Preview({ now, changes, preview }: PreviewProps) {
  const names = Object.keys(changes) as (keyof RoutingWeights)[];
  if (names.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        Nothing is changed yet.
      </Text>
    );
  }
  if (preview.error) return <ProblemAlert error={preview.error} />;
  const told = names
    .filter((name) => !isSame(now[name], changes[name] ?? []))
    .map(
      (name) => `${LABELS[name]}: ${shown(name, now[name])} → ${shown(name, changes[name] ?? [])}`,
    );
  return (
    <section aria-label="Preview">
      <Text size="sm" c="dimmed">
        {preview.isSure ? "Would append RoutingWeightsSet:" : "Asking what it would do …"}
      </Text>
      {told.map((line) => (
        <Text key={line} size="sm" fw={500}>
          {line}
        </Text>
      ))}
    </section>
  );
}
