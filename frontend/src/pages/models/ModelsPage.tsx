import { Button, TextInput } from "@mantine/core";
import { IconPlus, IconSearch } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { modelsQuery } from "@/api/models";
import { sessionQuery, useMayWrite } from "@/api/session";
import type { Model } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { Id } from "@/ui/Id";
import { Page } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";
import { ReasonLine } from "@/ui/Stuck";
import { Time } from "@/ui/Time";
import { DemandSections } from "./DemandSections";
import { RegisterModelModal } from "./RegisterModelModal";
import { liveVersions, modelStatus, replicaCounts, worstVersion } from "./replicas";

const route = getRouteApi("/app/models");

export function ModelsPage() {
  const { register, q } = route.useSearch();
  const navigate = route.useNavigate();
  const writable = useMayWrite("model");
  const fleet = !useQuery(sessionQuery).data?.tenant_id; // a tenant sees no decisions
  const open = (value: true | undefined) => navigate({ search: { q, register: value } });
  const filter = (value: string) => navigate({ search: { q: value || undefined }, replace: true });
  const actions = (
    <>
      <TextInput
        aria-label="Filter models"
        placeholder="Filter"
        leftSection={<IconSearch size={14} />}
        defaultValue={q ?? ""}
        onChange={(event) => filter(event.currentTarget.value)}
      />
      {writable && (
        <Button leftSection={<IconPlus size={14} />} onClick={() => open(true)}>
          Register model
        </Button>
      )}
    </>
  );
  return (
    <Page
      title="Models"
      sub="What can be served: each model with its versions and how many replicas are ready."
      actions={actions}
    >
      <ModelList filter={q ?? ""} />
      {fleet && <DemandSections />}
      <RegisterModelModal opened={register === true} onClose={() => open(undefined)} />
    </Page>
  );
}

const APPLY = "python manage.py apply models.yaml";

function ModelList({ filter }: { filter: string }) {
  const models = useQuery(modelsQuery);
  const navigate = route.useNavigate();
  const rows = models.data?.filter((model) => model.name.includes(filter.toLowerCase()));
  return (
    <Async query={models}>
      {models.data?.length === 0 ? (
        <Empty title="No model is registered" command={APPLY}>
          Press “Register model” above, or apply a file that lists models and their versions.
        </Empty>
      ) : (
        <DataTable
          label="Models"
          columns={COLUMNS}
          rows={rows}
          rowKey={(model) => model.name}
          onRowClick={({ name }) => navigate({ to: "/models/$name", params: { name } })}
        />
      )}
    </Async>
  );
}

function replicasText(model: Model): string {
  const { ready, desired } = replicaCounts(liveVersions(model));
  return `${ready} / ${desired}`;
}

/** Its worst version's state, and under it why. */
function Standing({ model }: { model: Model }) {
  const worst = worstVersion(model);
  return (
    <>
      <Status value={modelStatus(model)} />
      {worst && <ReasonLine of={worst} />}
    </>
  );
}

const COLUMNS: Column<Model>[] = [
  {
    title: "Model",
    cell: ({ name }) => (
      <RouterAnchor to="/models/$name" params={{ name }} className="mono">
        {name}
      </RouterAnchor>
    ),
  },
  { title: "Status", cell: (model) => <Standing model={model} /> },
  { title: "Replicas", right: true, cell: replicasText },
  {
    title: "Default",
    cell: ({ default_version }) => (default_version ? <Id value={default_version} /> : "–"),
  },
  { title: "Versions", right: true, minor: true, cell: (model) => liveVersions(model).length },
  {
    title: "Aliases",
    minor: true,
    cell: ({ aliases }) => <span className="mono">{aliases.join(", ") || "–"}</span>,
  },
  {
    title: "Access",
    minor: true,
    cell: ({ access }) => (access.public ? "everyone" : `${access.tenants.length} tenants`),
  },
  { title: "Registered", minor: true, cell: (model) => <Time at={model.created_at} /> },
];
