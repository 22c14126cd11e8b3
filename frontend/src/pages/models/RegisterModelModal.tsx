import { Text, TextInput } from "@mantine/core";
import { useNavigate } from "@tanstack/react-router";
import { useState } from "react";
import { registerModel } from "@/api/models";
import { FormModal } from "@/ui/FormModal";

export const NAME_RULE = "1 to 63 of a–z, 0–9, “.”, “_” and “-”; it cannot be changed later.";

export function RegisterModelModal(props: { opened: boolean; onClose: () => void }) {
  const [name, setName] = useState("");
  const navigate = useNavigate();
  return (
    <FormModal
      title="Register model"
      opened={props.opened}
      onClose={props.onClose}
      submitLabel="Register"
      submit={() => registerModel(name)}
      done={({ changed }) => (changed ? `${name} is registered` : `${name} exists already`)}
      touches={["models"]}
      onDone={({ changed }) => {
        const search = changed ? { add: true } : {};
        void navigate({ to: "/models/$name", params: { name }, search });
      }}
    >
      <TextInput
        label="Name"
        description={NAME_RULE}
        required
        data-autofocus
        value={name}
        onChange={(event) => setName(event.currentTarget.value)}
      />
      <Text size="sm" c="dimmed">
        Next you add its first version: where the weights come from and how much memory it needs.
      </Text>
    </FormModal>
  );
}
