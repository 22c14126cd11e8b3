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
  needsReason?: boolean;
  run: (reason: string) => Promise<unknown>;
}

/** Asks before an order with consequences, and takes the reason that the log will show. */
export function ConfirmModal(props: { ask: Confirmation | null; onClose: () => void }) {
  const { ask, onClose } = props;
  const [reason, setReason] = useState("");
  const shown = useLast(ask);
  if (shown === null) return null;
  const close = () => {
    setReason("");
    onClose();
  };
  return (
    <FormModal
      {...shown}
      opened={ask !== null}
      onClose={close}
      submitLabel={shown.label}
      submit={() => shown.run(reason)}
      disabled={shown.needsReason && reason.trim() === ""}
    >
      <Text size="sm">{shown.text}</Text>
      <TextInput
        label="Reason"
        description={`${shown.needsReason ? "" : "Optional. "}Kept in the event log.`}
        required={shown.needsReason}
        value={reason}
        onChange={(event) => setReason(event.currentTarget.value)}
      />
    </FormModal>
  );
}

/** The last question that was asked, so that the dialog does not go blank while it fades out. */
function useLast(ask: Confirmation | null): Confirmation | null {
  const [last, setLast] = useState(ask);
  if (ask !== null && ask !== last) setLast(ask);
  return ask ?? last;
}
