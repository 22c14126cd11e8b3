import { SegmentedControl, Select, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useCurrency } from "@/api/fleet";
import { tenantsQuery } from "@/api/tenants";
import type { Usage } from "@/api/types";
import { GROUPS, type Group, usageQuery } from "@/api/usage";
import { Async } from "@/ui/Async";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { integer } from "@/ui/format";
import { Page } from "@/ui/Page";
import classes from "../events/Events.module.css";
import { CheckSection } from "./CheckSection";

const route = getRouteApi("/app/usage");
const PERIODS = [
  { value: "1", label: "Today" },
  { value: "7", label: "7 days" },
  { value: "30", label: "30 days" },
  { value: "365", label: "365 days" },
];

export function UsagePage() {
  const { by = "day", days = 7, tenant } = route.useSearch();
  const navigate = route.useNavigate();
  const tenants = useQuery(tenantsQuery).data ?? [];
  const change = (part: object) => navigate({ search: (old) => ({ ...old, ...part }) });
  return (
    <Page title="Usage" sub="Tokens and money, summed over the request records.">
      <search className={classes.filters}>
        <Select
          label="By"
          data={[...GROUPS]}
          allowDeselect={false}
          value={by}
          onChange={(group) => group && change({ by: group as Group })}
        />
        <Select
          label="Tenant"
          placeholder="any"
          clearable
          searchable
          data={tenants.map((each) => each.tenant_id)}
          value={tenant ?? null}
          onChange={(id) => change({ tenant: id ?? undefined })}
        />
        <SegmentedControl
          aria-label="Period"
          data={PERIODS}
          value={String(days)}
          onChange={(value) => change({ days: Number(value) })}
          className={classes.choice}
        />
      </search>
      <UsageTable group={by} days={days} tenant={tenant} />
      <CheckSection />
    </Page>
  );
}

interface UsageTableProps {
  group: Group;
  days: number;
  tenant: string | undefined;
}

function UsageTable(question: UsageTableProps) {
  const usage = useQuery(usageQuery(question));
  const currency = useCurrency();
  const rows = usage.data && [...usage.data.results, { ...usage.data.total, group: {} }];
  return (
    <Async query={usage}>
      {usage.data?.count === 0 ? (
        <Empty title="No usage">No request ended in this period.</Empty>
      ) : (
        <>
          <DataTable
            label="Usage"
            columns={columns(question.group, currency)}
            rows={rows}
            rowKey={(row) => JSON.stringify(row.group)}
          />
          {usage.data && <Completeness usage={usage.data} />}
        </>
      )}
    </Async>
  );
}

function Completeness({ usage }: { usage: Usage }) {
  const { since, position, behind } = usage;
  const shown = usage.results.length;
  return (
    <Text size="xs" c="dimmed" mt="xs">
      From {since} on, complete up to record {integer(position)}
      {behind > 0 && ` (${integer(behind)} records are not added up yet)`}. Hours and days are UTC.
      {shown < usage.count && ` The first ${shown} of ${integer(usage.count)} are shown.`}
    </Text>
  );
}

type Row = Usage["results"][number];

const isTotal = (row: Row) => Object.keys(row.group).length === 0;

/** What a row stands for; empty names are said, since a blank cell says nothing. */
function nameOf(group: Group, row: Row): string {
  if (group === "arm")
    return row.group.route ? `${row.group.route} / ${row.group.arm}` : "no route";
  return row.group[group] || "none named";
}

function columns(group: Group, currency: string): Column<Row>[] {
  return [
    {
      title: group === "arm" ? "Route / arm" : group[0]?.toUpperCase() + group.slice(1),
      cell: (row) =>
        isTotal(row) ? <b>Total</b> : <span className="mono">{nameOf(group, row)}</span>,
    },
    { title: "Requests", right: true, minor: true, cell: (row) => integer(row.num_requests) },
    { title: "Failed", right: true, minor: true, cell: (row) => integer(row.num_failed) },
    { title: "Prompt", right: true, cell: (row) => integer(row.num_prompt_tokens) },
    { title: "Cached", right: true, minor: true, cell: (row) => integer(row.num_cached_tokens) },
    { title: "Output", right: true, cell: (row) => integer(row.num_output_tokens) },
    { title: `Price, ${currency}`, right: true, pinned: true, cell: (row) => row.price },
  ];
}
