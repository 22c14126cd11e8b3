import { Button, MultiSelect, Switch, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { setAccess } from "@/api/models";
import { tenantsQuery } from "@/api/tenants";
import { FormModal } from "@/ui/FormModal";
import { Section } from "@/ui/Page";
import type { DetailProps } from "./detail";

export function AccessSection({ model, etag, writable }: DetailProps) {
  const [editing, setEditing] = useState(false);
  const { access } = model;
  const edit = writable && (
    <Button variant="default" onClick={() => setEditing(true)}>
      Change access
    </Button>
  );
  return (
    <Section title="Access" actions={edit}>
      <Text size="sm">
        {access.public ? "Every tenant may use this model." : listed(access.tenants)}
        {access.roles.length > 0 && ` Only with role ${access.roles.join(" or ")}.`}
      </Text>
      <AccessModal
        key={etag}
        model={model}
        etag={etag}
        opened={editing}
        onClose={() => setEditing(false)}
      />
    </Section>
  );
}

function listed(tenants: string[]): string {
  if (tenants.length === 0) return "No tenant may use this model.";
  return `Only these tenants may use it: ${tenants.join(", ")}.`;
}

interface AccessModalProps {
  model: DetailProps["model"];
  etag: string;
  opened: boolean;
  onClose: () => void;
}

function AccessModal({ model, etag, opened, onClose }: AccessModalProps) {
  const [open, setOpen] = useState(model.access.public);
  const [tenants, setTenants] = useState(model.access.tenants);
  const [roles, setRoles] = useState(model.access.roles);
  const all = useQuery(tenantsQuery).data ?? [];
  return (
    <FormModal
      title={`Who may use ${model.name}`}
      opened={opened}
      onClose={onClose}
      submitLabel="Save access"
      submit={() => setAccess(model.name, { public: open, tenants, roles }, etag)}
      done={`Access to ${model.name} is changed`}
      touches={["models"]}
    >
      <Switch
        label="Every tenant"
        checked={open}
        onChange={(event) => setOpen(event.currentTarget.checked)}
      />
      <MultiSelect
        label="Only these tenants"
        size="xs"
        disabled={open}
        data={all.map((tenant) => tenant.tenant_id)}
        value={tenants}
        onChange={setTenants}
        searchable
      />
      <MultiSelect
        label="Only with these roles"
        description="Of the key, the token or the user. None means any role."
        size="xs"
        data={["admin", "operator", "auditor", "developer", "viewer"]}
        value={roles}
        onChange={(chosen) => setRoles(chosen as typeof roles)}
      />
    </FormModal>
  );
}
