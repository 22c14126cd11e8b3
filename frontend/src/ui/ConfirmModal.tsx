import { Text, TextInput } from "@mantine/core";
import { useState } from "react";
import { FormModal } from "./FormModal";

export interface Confirmation {
  title: string;
  text: string;
  label: string;
  done: string;
  touches: string[];
  danger?: boolean;
  run: (reason: string) => Promise<unknown>;
}

/** Asks before an order with consequences, and takes the reason that the log will show. */
export function ConfirmModal(props: { ask: Confirmation | null; onClose: () => void }) {
  const { ask, onClose } = props;
  const [reason, setReason] = useState("");
  const close = () => {
    setReason("");
    onClose();
  };
  return (
    <FormModal
      title={ask?.title ?? ""}
      opened={ask !== null}
      onClose={close}
      submitLabel={ask?.label ?? ""}
      submit={() => ask?.run(reason) ?? Promise.resolve()}
      done={ask?.done ?? ""}
      touches={ask?.touches ?? []}
      danger={ask?.danger}
    >
      <Text size="sm">{ask?.text}</Text>
      <TextInput
        label="Reason"
        description="Optional. Kept in the event log."
        value={reason}
        onChange={(event) => setReason(event.currentTarget.value)}
      />
    </FormModal>
  );
}
