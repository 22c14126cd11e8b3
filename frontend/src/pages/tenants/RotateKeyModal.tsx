import { Select, Text } from "@mantine/core";
import { useState } from "react";
import { rotateKey } from "@/api/tenants";
import type { ApiKey, IssuedKey } from "@/api/types";
import { FormModal } from "@/ui/FormModal";

const HOUR = 3_600;
const OVERLAPS = [
  { value: "0", label: "At once" },
  { value: String(HOUR), label: "In an hour" },
  { value: String(24 * HOUR), label: "In a day" },
  { value: String(7 * 24 * HOUR), label: "In a week" },
  { value: String(30 * 24 * HOUR), label: "In 30 days" },
];

interface RotateKeyModalProps {
  apiKey: ApiKey | null;
  onClose: () => void;
  onRotated: (key: IssuedKey) => void;
}

/** A second secret of the key, so that its clients can move to it while the old one still works. */
export function RotateKeyModal({ apiKey, onClose, onRotated }: RotateKeyModalProps) {
  const [overlap, setOverlap] = useState(String(24 * HOUR));
  if (apiKey === null) return null;
  const { tenant_id, key_id, name } = apiKey;
  const until = () => (overlap === "0" ? 0 : Date.now() / 1_000 + Number(overlap));
  return (
    <FormModal
      title={`Rotate the secret of “${name}”`}
      opened
      onClose={onClose}
      submitLabel="Make a new secret"
      submit={() => rotateKey(tenant_id, key_id, until())}
      done={`Key ${name} has a new secret`}
      touches={["tenants"]}
      onDone={onRotated}
      danger={overlap === "0"}
    >
      <Text size="sm">
        The new secret is shown once. An older one than the present is over when you press the
        button.
      </Text>
      <Select
        label="The present secret ends"
        data={OVERLAPS}
        allowDeselect={false}
        value={overlap}
        onChange={(value) => value && setOverlap(value)}
      />
    </FormModal>
  );
}
