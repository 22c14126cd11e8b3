import { Select, TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import type { RequestFilters } from "@/api/history";
import { tenantsQuery } from "@/api/tenants";
import classes from "../events/Events.module.css";

const OUTCOMES = ["running", "ok", "cancelled", "error", "timeout", "unknown"];

interface RequestFilterBarProps {
  filters: RequestFilters;
  onChange: (change: RequestFilters) => void;
}

export function RequestFilterBar({ filters, onChange }: RequestFilterBarProps) {
  const tenants = useQuery(tenantsQuery).data ?? [];
  const later = useDebouncedCallback(onChange, 400);
  const typed = (name: keyof RequestFilters, value: string) =>
    later({ [name]: value.trim() || undefined });
  return (
    <search className={classes.filters}>
      <Select
        label="Tenant"
        placeholder="any"
        clearable
        searchable
        data={tenants.map((tenant) => tenant.tenant_id)}
        value={filters.tenant ?? null}
        onChange={(tenant) => onChange({ tenant: tenant ?? undefined })}
      />
      <TextInput
        label="Model"
        placeholder="name, alias or model@version"
        defaultValue={filters.model ?? ""}
        onChange={(event) => typed("model", event.currentTarget.value)}
      />
      <Select
        label="Outcome"
        placeholder="any"
        clearable
        data={OUTCOMES}
        value={filters.outcome ?? null}
        onChange={(outcome) => onChange({ outcome: outcome ?? undefined })}
      />
      <TextInput
        label="Request id"
        placeholder="req-…"
        defaultValue={filters.request_id ?? ""}
        onChange={(event) => typed("request_id", event.currentTarget.value)}
      />
    </search>
  );
}
