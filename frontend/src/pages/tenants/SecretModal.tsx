import { Button, Group, Modal, Stack, Text, TextInput } from "@mantine/core";
import type { IssuedKey } from "@/api/types";
import { CopyTextButton } from "@/ui/CopyButton";

/** The only time the secret is on a screen; a click outside does not lose it. */
export function SecretModal({
  issued,
  onClose,
}: {
  issued: IssuedKey | null;
  onClose: () => void;
}) {
  return (
    <Modal
      opened={issued !== null}
      onClose={onClose}
      title="Copy the key now"
      closeOnClickOutside={false}
      size="lg"
    >
      <Stack gap="sm">
        <Text size="sm">
          The server keeps only a hash of it. After you close this it cannot be shown again; issue
          another key if it is lost.
        </Text>
        <TextInput
          label="API key"
          readOnly
          className="mono"
          value={issued?.secret ?? ""}
          onFocus={(event) => event.currentTarget.select()}
        />
        <Group justify="flex-end" gap="xs">
          <CopyTextButton value={issued?.secret ?? ""}>Copy key</CopyTextButton>
          <Button onClick={onClose}>I have stored it</Button>
        </Group>
      </Stack>
    </Modal>
  );
}
