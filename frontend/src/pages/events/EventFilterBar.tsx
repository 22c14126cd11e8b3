import { TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import type { EventFilters } from "@/api/events";
import classes from "./Events.module.css";

const FIELDS: { name: keyof EventFilters; label: string; placeholder: string }[] = [
  { name: "stream", label: "Stream", placeholder: "node-n1" },
  { name: "type", label: "Type", placeholder: "ReplicaBecameReady" },
  { name: "actor", label: "Actor", placeholder: "user:admin" },
];

interface EventFilterBarProps {
  filters: EventFilters;
  onChange: (change: EventFilters) => void;
  count: string | undefined;
}

export function EventFilterBar({ filters, onChange, count }: EventFilterBarProps) {
  const change = useDebouncedCallback(onChange, 350);
  return (
    <search className={classes.filters}>
      {FIELDS.map(({ name, label, placeholder }) => (
        <TextInput
          key={name}
          label={label}
          placeholder={placeholder}
          defaultValue={filters[name] ?? ""}
          onChange={(event) => change({ [name]: event.currentTarget.value.trim() || undefined })}
        />
      ))}
      <span className={classes.count}>{count}</span>
    </search>
  );
}
