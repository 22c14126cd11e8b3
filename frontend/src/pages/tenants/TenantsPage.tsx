import { Button, Select, TextInput } from "@mantine/core";
import { IconPlus } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useState } from "react";
import { useCurrency } from "@/api/fleet";
import { useMayWrite } from "@/api/session";
import { createTenant, tenantsQuery } from "@/api/tenants";
import type { Tenant, Tier } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { FormModal } from "@/ui/FormModal";
import { Page } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";
import { Time } from "@/ui/Time";
import { limitText } from "./budgets";

const route = getRouteApi("/app/tenants");

export const TIERS: Tier[] = ["free", "standard", "premium"];

export function TenantsPage() {
  const { create } = route.useSearch();
  const navigate = route.useNavigate();
  const writable = useMayWrite("tenant");
  const add = writable && (
    <Button
      leftSection={<IconPlus size={14} />}
      onClick={() => navigate({ search: { create: true } })}
    >
      Create tenant
    </Button>
  );
  return (
    <Page title="Tenants" sub="Who may call the models, with which keys and budgets." actions={add}>
      <TenantList />
      <CreateTenantModal
        opened={create === true}
        onClose={() => navigate({ search: {} })}
        onDone={(id) => navigate({ to: "/tenants/$id", params: { id } })}
      />
    </Page>
  );
}

function TenantList() {
  const tenants = useQuery(tenantsQuery);
  const currency = useCurrency();
  const navigate = route.useNavigate();
  return (
    <Async query={tenants}>
      {tenants.data?.length === 0 ? (
        <Empty title="No tenant yet">
          Press “Create tenant”, then issue an API key on its page. Without a key nobody can call a
          model.
        </Empty>
      ) : (
        <DataTable
          label="Tenants"
          columns={columns(currency)}
          rows={tenants.data}
          rowKey={(tenant) => tenant.tenant_id}
          onRowClick={({ tenant_id: id }) => navigate({ to: "/tenants/$id", params: { id } })}
        />
      )}
    </Async>
  );
}

const columns = (currency: string): Column<Tenant>[] => [
  {
    title: "Tenant",
    cell: ({ tenant_id: id }) => (
      <RouterAnchor to="/tenants/$id" params={{ id }} className="mono">
        {id}
      </RouterAnchor>
    ),
  },
  {
    title: "State",
    cell: (tenant) => <Status value={tenant.suspended ? "suspended" : "active"} />,
  },
  { title: "Tier", cell: (tenant) => tenant.tier },
  {
    title: "Budgets",
    right: true,
    cell: (tenant) => tenant.budgets.map((one) => limitText(one, currency)).join(" · ") || "none",
  },
  { title: "Live keys", right: true, minor: true, cell: (tenant) => tenant.num_keys },
  { title: "Created", minor: true, cell: (tenant) => <Time at={tenant.created_at} /> },
];

interface CreateTenantModalProps {
  opened: boolean;
  onClose: () => void;
  onDone: (id: string) => void;
}

function CreateTenantModal({ opened, onClose, onDone }: CreateTenantModalProps) {
  const [name, setName] = useState("");
  const [tier, setTier] = useState<Tier>("standard");
  return (
    <FormModal
      title="Create tenant"
      opened={opened}
      onClose={onClose}
      submitLabel="Create tenant"
      submit={() => createTenant(name, tier)}
      done={`Tenant ${name} is created`}
      touches={["tenants"]}
      onDone={() => onDone(name)}
    >
      <TextInput
        label="Name"
        description="1 to 63 of a–z, 0–9, “.”, “_” and “-”."
        required
        data-autofocus
        value={name}
        onChange={(event) => setName(event.currentTarget.value)}
      />
      <Select
        label="Tier"
        description="Sets the rate limits."
        data={TIERS}
        allowDeselect={false}
        value={tier}
        onChange={(value) => value && setTier(value as Tier)}
      />
    </FormModal>
  );
}
