import { ActionIcon, Button, NumberInput, Select, Switch, Text, TextInput } from "@mantine/core";
import { IconPlus, IconTrash } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { modelsQuery } from "@/api/models";
import { changeRoute, createRoute, shareOf } from "@/api/routes";
import type { Arm, Route } from "@/api/types";
import { FormModal } from "@/ui/FormModal";
import { percent } from "@/ui/format";
import classes from "./Routes.module.css";
import { ShareBar } from "./ShareBar";

interface RouteModalProps {
  opened: boolean;
  onClose: () => void;
  /** The route to edit with its ETag; absent to create one. */
  known?: { value: Route; etag: string };
}

type KeyedArm = Arm & { key: number };

const FIRST: Arm[] = [
  { name: "a", version_id: "", weight: 90 },
  { name: "b", version_id: "", weight: 10 },
];

function keyed(arms: Arm[]): KeyedArm[] {
  return arms.map((arm, key) => ({ ...arm, key }));
}

function useArms(first: Arm[]) {
  const [arms, setArms] = useState(() => keyed(first));
  const change = (key: number, part: Partial<Arm>) =>
    setArms((old) => old.map((arm) => (arm.key === key ? { ...arm, ...part } : arm)));
  const remove = (key: number) => setArms((old) => old.filter((arm) => arm.key !== key));
  const add = () =>
    setArms((old) => {
      const key = Math.max(-1, ...old.map((arm) => arm.key)) + 1;
      return [...old, { key, name: "", version_id: "", weight: 0 }];
    });
  return { arms, change, remove, add };
}

export function RouteModal({ opened, onClose, known }: RouteModalProps) {
  const [name, setName] = useState(known?.value.name ?? "");
  const [sticky, setSticky] = useState(known?.value.sticky ?? true);
  const form = useArms(known?.value.arms ?? FIRST);
  const arms = form.arms.map(({ key: _, ...arm }) => arm);
  const route = { name, arms, sticky };
  return (
    <FormModal
      title={known ? `Edit route ${name}` : "Create route"}
      opened={opened}
      onClose={onClose}
      size="xl"
      submitLabel={known ? "Save route" : "Create route"}
      submit={() => (known ? changeRoute(route, known.etag) : createRoute(route))}
      done={`Route ${name} is saved`}
      touches={["routes"]}
    >
      {!known && (
        <TextInput
          label="Name"
          description="What clients ask for as “model”."
          required
          data-autofocus
          value={name}
          onChange={(event) => setName(event.currentTarget.value)}
        />
      )}
      <ArmFields {...form} />
      <Switch
        label="Keep each user on one arm"
        description="On unless switched off: the same user gets the same arm for as long as the weights hold. A user is the request's user field, else its API key, so a single client without user fields sees one arm only. Off, each request draws anew."
        checked={sticky}
        onChange={(event) => setSticky(event.currentTarget.checked)}
      />
      <Preview arms={arms} />
    </FormModal>
  );
}

function Preview({ arms }: { arms: Arm[] }) {
  return (
    <div>
      <Text size="xs" c="dimmed" mb={4}>
        Share of traffic after saving
      </Text>
      <ShareBar arms={arms} />
    </div>
  );
}

function ArmFields({ arms, change, remove, add }: ReturnType<typeof useArms>) {
  return (
    <>
      {arms.map((arm) => (
        <fieldset key={arm.key} style={{ border: 0, padding: 0, margin: 0 }}>
          <legend hidden>Arm {arm.name}</legend>
          <ArmRow
            arm={arm}
            arms={arms}
            change={(part) => change(arm.key, part)}
            remove={() => remove(arm.key)}
          />
        </fieldset>
      ))}
      <Button
        variant="subtle"
        leftSection={<IconPlus size={14} />}
        onClick={add}
        style={{ alignSelf: "flex-start" }}
      >
        Add arm
      </Button>
    </>
  );
}

interface ArmRowProps {
  arm: KeyedArm;
  arms: KeyedArm[];
  change: (part: Partial<Arm>) => void;
  remove: () => void;
}

function useVersionIds(): string[] {
  const models = useQuery(modelsQuery).data ?? [];
  return models.flatMap((model) =>
    model.versions.filter((version) => !version.retired).map((version) => version.version_id),
  );
}

function ArmRow({ arm, arms, change, remove }: ArmRowProps) {
  const versions = useVersionIds();
  return (
    <div className={classes.armEdit}>
      <TextInput
        label="Arm"
        required
        value={arm.name}
        onChange={(event) => change({ name: event.currentTarget.value })}
      />
      <Select
        label="Version"
        required
        searchable
        placeholder="model@version"
        data={[...new Set([...versions, arm.version_id])].filter(Boolean)}
        value={arm.version_id || null}
        onChange={(version_id) => change({ version_id: version_id ?? "" })}
      />
      <NumberInput
        label="Weight"
        min={0}
        value={arm.weight}
        onChange={(weight) => change({ weight: Number(weight) })}
      />
      <span className={classes.share}>{percent(shareOf(arm, arms), 1)}</span>
      <ActionIcon
        aria-label={`Remove arm ${arm.name}`}
        disabled={arms.length === 1}
        onClick={remove}
      >
        <IconTrash size={15} />
      </ActionIcon>
    </div>
  );
}
