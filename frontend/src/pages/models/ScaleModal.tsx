import { Group, NumberInput } from "@mantine/core";
import { useState } from "react";
import { scaleVersion } from "@/api/models";
import type { Version } from "@/api/types";
import { FormModal } from "@/ui/FormModal";
import { scaling } from "./replicas";

interface ScaleModalProps {
  order: { name: string; version: string; etag: string };
  version: Version;
  opened: boolean;
  onClose: (opened: false) => void;
}

export function ScaleModal({ order, version, opened, onClose }: ScaleModalProps) {
  const [low, setLow] = useState<number>(version.min_replicas);
  const [high, setHigh] = useState<number>(version.max_replicas);
  const raise = (value: number) => {
    setLow(value);
    setHigh((old) => Math.max(old, value));
  };
  return (
    <FormModal
      title={`Scale ${version.version_id}`}
      opened={opened}
      onClose={() => onClose(false)}
      submitLabel="Scale"
      submit={() => scaleVersion(order, low, high)}
      done={`${version.version_id} keeps ${scaling(low, high)}`}
      touches={["models", "placements"]}
    >
      <Group grow>
        <NumberInput
          label="Minimum replicas"
          description="0 lets it go cold"
          min={0}
          value={low}
          onChange={(value) => raise(Number(value))}
        />
        <NumberInput
          label="Maximum replicas"
          description="Bound by the fleet's memory"
          min={Math.max(1, low)}
          value={high}
          onChange={(value) => setHigh(Number(value))}
        />
      </Group>
    </FormModal>
  );
}
