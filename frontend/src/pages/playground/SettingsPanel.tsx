import { NumberInput, Select, Textarea } from "@mantine/core";
import { useMediaQuery } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { tenantsQuery } from "@/api/tenants";
import classes from "./Playground.module.css";
import type { PlaygroundSettings } from "./settings";
import type { TargetGroup } from "./useTargets";

interface SettingsPanelProps {
  settings: PlaygroundSettings;
  targets: TargetGroup[];
  change: (part: PlaygroundSettings) => void;
}

export function SettingsPanel({ settings, targets, change }: SettingsPanelProps) {
  const tenants = useQuery(tenantsQuery).data ?? [];
  return (
    <aside className={classes.side} aria-label="Parameters">
      <Select
        label="Model"
        searchable
        allowDeselect={false}
        data={targets}
        value={settings.model ?? null}
        onChange={(model) => model && change({ model })}
      />
      <Select
        label="Billed to tenant"
        allowDeselect={false}
        data={tenants.map((tenant) => tenant.tenant_id)}
        value={settings.tenant ?? null}
        onChange={(tenant) => tenant && change({ tenant })}
      />
      <More settings={settings} change={change} />
    </aside>
  );
}

type MoreProps = Pick<SettingsPanelProps, "settings" | "change">;

/** On a phone the rest is folded away, so that the conversation stays in view. */
function More(props: MoreProps) {
  const wide = useMediaQuery("(min-width: 62em)", true);
  if (wide) return <Rest {...props} />;
  return (
    <details>
      <summary>Parameters</summary>
      <div className={classes.side}>
        <Rest {...props} />
      </div>
    </details>
  );
}

function Rest({ settings, change }: MoreProps) {
  return (
    <>
      <Textarea
        label="System prompt"
        autosize
        minRows={1}
        maxRows={6}
        value={settings.system ?? ""}
        onChange={(event) => change({ system: event.currentTarget.value || undefined })}
      />
      <Numbers settings={settings} change={change} />
    </>
  );
}

type NumberName = "max_tokens" | "temperature" | "top_p" | "seed";

const NUMBERS: { name: NumberName; label: string; shown: string; max?: number; step: number }[] = [
  { name: "max_tokens", label: "Output tokens, at most", shown: "256", step: 64 },
  { name: "temperature", label: "Temperature", shown: "0.7", max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", shown: "1", max: 1, step: 0.05 },
  { name: "seed", label: "Seed", shown: "random", step: 1 },
];

function Numbers({ settings, change }: MoreProps) {
  return NUMBERS.map(({ name, label, shown, max, step }) => (
    <NumberInput
      key={name}
      label={label}
      placeholder={shown}
      min={0}
      max={max}
      step={step}
      allowDecimal={step < 1}
      value={settings[name] ?? ""}
      onChange={(value) => change({ [name]: value === "" ? undefined : Number(value) })}
    />
  ));
}
