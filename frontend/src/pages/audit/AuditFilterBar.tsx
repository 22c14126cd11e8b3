import { Select, TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import type { AuditFilters } from "@/api/audit";
import classes from "../events/Events.module.css";

const TYPED: { name: "q" | "actor" | "target"; label: string; placeholder: string }[] = [
  { name: "q", label: "Search", placeholder: "any text" },
  { name: "actor", label: "Actor", placeholder: "user:admin" },
  { name: "target", label: "Target", placeholder: "tenant-acme" },
];

interface AuditFilterBarProps {
  filters: AuditFilters;
  onChange: (change: AuditFilters) => void;
}

export function AuditFilterBar({ filters, onChange }: AuditFilterBarProps) {
  const later = useDebouncedCallback(onChange, 400);
  return (
    <search className={classes.filters}>
      {TYPED.map(({ name, label, placeholder }) => (
        <TextInput
          key={name}
          label={label}
          placeholder={placeholder}
          defaultValue={filters[name] ?? ""}
          onChange={(event) => later({ [name]: event.currentTarget.value.trim() || undefined })}
        />
      ))}
      <Select
        label="Outcome"
        placeholder="any"
        clearable
        data={["done", "refused"]}
        value={filters.outcome ?? null}
        onChange={(value) => onChange({ outcome: (value ?? undefined) as AuditFilters["outcome"] })}
      />
    </search>
  );
}
