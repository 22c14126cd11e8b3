import { MultiSelect, Select, TagsInput, TextInput } from "@mantine/core";
import { useState } from "react";
import { issueKey } from "@/api/tenants";
import type { IssuedKey, NewKey } from "@/api/types";
import { FormModal } from "@/ui/FormModal";

type Role = NonNullable<NewKey["role"]>;
type Scope = NonNullable<NewKey["scopes"]>[number];
const SCOPES: Scope[] = ["inference", "admin:read", "admin:write", "text:read"];
const ROLES: Role[] = ["admin", "operator", "auditor", "developer", "viewer"];
const DAY = 86_400;
const LIFETIMES = [
  { value: "0", label: "Never" },
  { value: String(30 * DAY), label: "In 30 days" },
  { value: String(90 * DAY), label: "In 90 days" },
  { value: String(365 * DAY), label: "In a year" },
];

interface IssueKeyModalProps {
  tenantId: string;
  opened: boolean;
  onClose: () => void;
  onIssued: (key: IssuedKey) => void;
}

export function IssueKeyModal({ tenantId, opened, onClose, onIssued }: IssueKeyModalProps) {
  const [name, setName] = useState("");
  const [role, setRole] = useState<Role>("developer");
  const [models, setModels] = useState<string[]>([]);
  const [scopes, setScopes] = useState<Scope[]>(["inference"]);
  const [lifetime, setLifetime] = useState("0");
  const expires_at = lifetime === "0" ? null : Math.floor(Date.now() / 1_000) + Number(lifetime);
  return (
    <FormModal
      title={`Issue a key to ${tenantId}`}
      opened={opened}
      onClose={onClose}
      submitLabel="Issue key"
      submit={() => issueKey(tenantId, { name, role, scopes, models, expires_at })}
      done={`Key ${name} is issued`}
      touches={["tenants"]}
      onDone={onIssued}
    >
      <TextInput
        label="Name"
        description="Where it is used, for example “billing-service”."
        required
        data-autofocus
        value={name}
        onChange={(event) => setName(event.currentTarget.value)}
      />
      <Select
        label="Role"
        description="What it may do in general; the scopes narrow it."
        data={ROLES}
        allowDeselect={false}
        value={role}
        onChange={(value) => value && setRole(value as Role)}
      />
      <TagsInput
        label="Models"
        description="Names it may ask for. None means all that the tenant may use."
        size="xs"
        value={models}
        onChange={setModels}
      />
      <MultiSelect
        label="Scopes"
        size="xs"
        data={SCOPES}
        value={scopes}
        onChange={(values) => setScopes(values as Scope[])}
      />
      <Select
        label="Expires"
        data={LIFETIMES}
        allowDeselect={false}
        value={lifetime}
        onChange={(value) => value && setLifetime(value)}
      />
    </FormModal>
  );
}
