import { Anchor, Button, Group, Text } from "@mantine/core";
import { IconDownload } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { statusQuery } from "@/api/fleet";
import type { Status as ClusterStatus } from "@/api/types";
import { Async } from "@/ui/Async";
import { Facts } from "@/ui/Facts";
import { integer } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Page, Section } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";
import { RetentionSection } from "./RetentionSection";
import { RoutingSection } from "./RoutingSection";

export function SettingsPage() {
  const status = useQuery(statusQuery);
  return (
    <Page title="Settings" sub="The health of the control plane, and what can be taken out of it.">
      <Async query={status}>{status.data && <Health status={status.data} />}</Async>
      <RoutingSection />
      <RetentionSection />
      <Section title="Export">
        <Text size="sm" mb="xs">
          The event log and the request ledger, whole and streamed. JSONL keeps every field; CSV
          opens in a spreadsheet.
        </Text>
        <Exports />
      </Section>
      <Section title="Reference">
        <Group gap="lg">
          <Anchor href="/api/docs">API reference</Anchor>
          <Anchor href="/api/schema">OpenAPI file</Anchor>
          <Anchor href="/metrics">Prometheus metrics</Anchor>
        </Group>
      </Section>
    </Page>
  );
}

function lagText({ projection_lag }: ClusterStatus): string {
  return projection_lag === 0 ? "none" : `${integer(projection_lag)} events`;
}

function healthFacts(status: ClusterStatus): [string, ReactNode][] {
  return [
    ["Cluster", <Id key="cluster" value={status.cluster_id} />],
    ["Version", status.version],
    ["Log head", integer(status.head)],
    ["Read model at", integer(status.position)],
    ["Lag of the read model", lagText(status)],
    [
      "Leading controller",
      status.leader ? (
        <Id key="leader" value={status.leader} />
      ) : (
        "none: nothing is placed until a controller runs (manage.py run_controller)"
      ),
    ],
    ["Gateway", <Id key="gateway" value={`${status.gateway_url}/v1`} />],
  ];
}

function Health({ status }: { status: ClusterStatus }) {
  return (
    <Section
      title="Health"
      actions={
        <Status
          value={status.ready ? "ready" : "failed"}
          label={status.ready ? "Ready" : "Not ready"}
        />
      }
    >
      <Facts items={healthFacts(status)} />
    </Section>
  );
}

const EXPORTS = [
  ["events", "jsonl", "Events as JSONL"],
  ["events", "csv", "Events as CSV"],
  ["events", "parquet", "Events as Parquet"],
  ["requests", "jsonl", "Requests as JSONL"],
  ["requests", "csv", "Requests as CSV"],
  ["requests", "parquet", "Requests as Parquet"],
] as const;

function Exports() {
  return (
    <Group gap="xs">
      {EXPORTS.map(([what, format, label]) => (
        <Button
          key={label}
          component="a"
          variant="default"
          leftSection={<IconDownload size={14} />}
          href={`/api/v1/exports/audit/?what=${what}&format=${format}`}
          download
        >
          {label}
        </Button>
      ))}
      <Button
        component="a"
        variant="default"
        leftSection={<IconDownload size={14} />}
        href="/api/v1/apply/"
        download="models.yaml"
      >
        Models as YAML
      </Button>
      <RouterAnchor to="/events" size="sm">
        Browse the log
      </RouterAnchor>
    </Group>
  );
}
