import { Group, TextInput } from "@mantine/core";
import { useState } from "react";
import { useCurrency } from "@/api/fleet";
import { setPrice } from "@/api/models";
import type { Version } from "@/api/types";
import { FormModal } from "@/ui/FormModal";

interface PriceModalProps {
  order: { name: string; version: string; etag: string };
  version: Version;
  opened: boolean;
  onClose: (opened: false) => void;
}

const FIELDS = [
  ["input", "Prompt"],
  ["cached_input", "Cached prompt"],
  ["output", "Output"],
] as const;

/** Prices stay texts from here to the server, which alone reads them: no float ever holds one. */
export function PriceModal({ order, version, opened, onClose }: PriceModalProps) {
  const currency = useCurrency();
  const [price, setTexts] = useState(version.price);
  return (
    <FormModal
      title={`Price of ${version.version_id}`}
      opened={opened}
      onClose={() => onClose(false)}
      submitLabel="Set price"
      submit={() => setPrice(order, price)}
      done={`The price of ${version.version_id} is set`}
      touches={["models"]}
    >
      <Group grow align="start">
        {FIELDS.map(([name, label]) => (
          <TextInput
            key={name}
            label={label}
            description={`${currency} per million tokens`}
            inputMode="decimal"
            required
            value={price[name]}
            onChange={(event) => setTexts({ ...price, [name]: event.currentTarget.value })}
          />
        ))}
      </Group>
    </FormModal>
  );
}
