import { ActionIcon, Button, Group, Pill, Text, TextInput } from "@mantine/core";
import { IconX } from "@tabler/icons-react";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { addAlias, removeAlias } from "@/api/models";
import type { Model } from "@/api/types";
import { FormModal } from "@/ui/FormModal";
import { toastDone, toastProblem } from "@/ui/notify";
import { Section } from "@/ui/Page";

interface AliasSectionProps {
  model: Model;
  writable: boolean;
}

export function AliasSection({ model, writable }: AliasSectionProps) {
  const [adding, setAdding] = useState(false);
  const add = writable && (
    <Button variant="default" onClick={() => setAdding(true)}>
      Add alias
    </Button>
  );
  return (
    <Section title="Aliases" actions={add}>
      {model.aliases.length === 0 && (
        <Text c="dimmed" size="sm">
          No alias. An alias lets clients ask for this model by another name.
        </Text>
      )}
      <Group gap="xs">
        {model.aliases.map((alias) => (
          <Alias key={alias} model={model.name} alias={alias} writable={writable} />
        ))}
      </Group>
      <AddAliasModal model={model.name} opened={adding} onClose={() => setAdding(false)} />
    </Section>
  );
}

function Alias({ model, alias, writable }: { model: string; alias: string; writable: boolean }) {
  const queries = useQueryClient();
  const remove = useMutation({
    mutationFn: () => removeAlias(model, alias),
    onSuccess: () => {
      toastDone(`Alias ${alias} is removed`);
      void queries.invalidateQueries({ queryKey: ["models"] });
    },
    onError: toastProblem,
  });
  return (
    <Pill size="md" className="mono">
      {alias}
      {writable && (
        <ActionIcon
          size={16}
          ml={4}
          aria-label={`Remove alias ${alias}`}
          loading={remove.isPending}
          onClick={() => remove.mutate()}
        >
          <IconX size={11} />
        </ActionIcon>
      )}
    </Pill>
  );
}

function AddAliasModal(props: { model: string; opened: boolean; onClose: () => void }) {
  const [alias, setAlias] = useState("");
  return (
    <FormModal
      title={`Add alias of ${props.model}`}
      opened={props.opened}
      onClose={props.onClose}
      submitLabel="Add alias"
      submit={() => addAlias(props.model, alias)}
      done={`${alias} now means ${props.model}`}
      touches={["models"]}
    >
      <TextInput
        label="Alias"
        required
        data-autofocus
        value={alias}
        onChange={(event) => setAlias(event.currentTarget.value)}
      />
    </FormModal>
  );
}
