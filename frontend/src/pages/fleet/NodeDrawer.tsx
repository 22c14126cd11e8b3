import { Drawer, Stack } from "@mantine/core";
import { useMemo } from "react";
import { type Sample, useTelemetry, useTelemetryHistory } from "@/api/telemetry";
import type { Node, Replica } from "@/api/types";
import { Chart, type Series } from "@/ui/Chart";
import { type Column, DataTable } from "@/ui/DataTable";
import { Facts } from "@/ui/Facts";
import { bytes, integer, percent, rate } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Section } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";
import { Stuck } from "@/ui/Stuck";
import { LiveTier, PlacedTier } from "@/ui/Tier";
import { Time } from "@/ui/Time";
import { Draining } from "./Draining";

export function NodeDrawer({ node, onClose }: { node: Node | undefined; onClose: () => void }) {
  return (
    <Drawer opened={node !== undefined} onClose={onClose} title={node && `Node ${node.node_id}`}>
      {node && <NodeDetail node={node} />}
    </Drawer>
  );
}

function NodeDetail({ node }: { node: Node }) {
  return (
    <Stack gap={0}>
      <NodeFacts node={node} />
      <Section title="Load, last minutes">
        <LoadCharts node={node} />
      </Section>
      <Section title="Replicas">
        <Replicas node={node} />
      </Section>
      <Section title="History">
        <RouterAnchor to="/events" search={{ stream: `node-${node.node_id}` }} size="sm">
          Events of this node
        </RouterAnchor>
      </Section>
    </Stack>
  );
}

function Replicas({ node }: { node: Node }) {
  if (node.replicas.length === 0) return <span>Nothing is placed here.</span>;
  return (
    <DataTable
      label="Replicas on this node"
      columns={REPLICA_COLUMNS}
      rows={node.replicas}
      rowKey={(replica) => replica.replica_id}
    />
  );
}

function NodeFacts({ node }: { node: Node }) {
  const report = useTelemetry(node.node_id);
  return (
    <Facts
      items={[
        ["Status", <Status key="status" value={node.draining ? "draining" : node.status} />],
        ...(node.draining
          ? [["Drain", <Draining key="drain" node={node} />] as [string, React.ReactNode]]
          : []),
        ["Zone", node.zone || "–"],
        ["Engines", node.host.engines.join(", ")],
        ["Last report", <Time key="report" at={report?.at} />],
        ["Last change", <Time key="seen" at={node.last_seen} />],
        ["Generation", generations(node)],
        ...(node.stuck_since === null
          ? []
          : [["Stuck", <Stuck key="stuck" of={node} />] as [string, React.ReactNode]]),
        ["Boot id", <Id key="boot" value={node.boot_id} short={13} />],
        [
          "Devices",
          node.devices.map((device) => `${device.name} (${bytes(device.memory_bytes)})`).join(", "),
        ],
      ]}
    />
  );
}

function generations({ acked_generation, desired_generation, stuck_code }: Node): string {
  if (stuck_code === "refused") return `${integer(desired_generation)} wanted, and refused`;
  if (acked_generation >= desired_generation) return `${integer(acked_generation)}, accepted`;
  return `${integer(desired_generation)} wanted, ${integer(acked_generation)} accepted`;
}

function seriesOf(samples: Sample[], node: Node): Series {
  const at = samples.map((sample) => sample.at);
  const loads = node.devices.map((device) =>
    samples.map((s) => s.devices.find((d) => d.index === device.index)?.utilization ?? 0),
  );
  return [at, ...loads];
}

function LoadCharts({ node }: { node: Node }) {
  const samples = useTelemetryHistory(node.node_id);
  const utilization = useMemo(() => seriesOf(samples, node), [samples, node]);
  const tokens = useMemo<Series>(
    () => [samples.map((sample) => sample.at), samples.map((sample) => sample.tokensPerSecond)],
    [samples],
  );
  if (samples.length === 0) return <span>No telemetry yet. The agent reports every 2 s.</span>;
  return (
    <>
      <span>Utilisation per device</span>
      <Chart
        label="Utilisation per device"
        data={utilization}
        series={node.devices.map((d) => ({ name: `${d.index}`, color: `--cat-${d.index % 8}` }))}
        format={percent}
        max={1}
      />
      <span>Tokens per second</span>
      <Chart
        label="Tokens per second"
        data={tokens}
        series={[{ name: "tok/s", color: "--accent" }]}
        format={rate}
      />
    </>
  );
}

function Reported({ replica }: { replica: Replica }) {
  return (
    <>
      <Status value={replica.observed ?? "nothing yet"} />
      <Stuck of={replica} />
      {replica.stuck_since === null && replica.waiting && <div>{replica.waiting}</div>}
    </>
  );
}

const REPLICA_COLUMNS: Column<Replica>[] = [
  { title: "Version", cell: (replica) => <Id value={replica.version_id} /> },
  { title: "Wanted", cell: (replica) => (replica.desired ? "yes" : "no") },
  { title: "Accepted", cell: (replica) => (replica.acked ? "yes" : "not yet") },
  { title: "Reports", cell: (replica) => <Reported replica={replica} /> },
  { title: "Tier now", cell: (replica) => <LiveTier replica={replica} /> },
  { title: "Placed in", cell: (replica) => <PlacedTier replica={replica} /> },
  { title: "Memory", right: true, cell: (replica) => bytes(replica.memory_bytes) },
  { title: "Since", minor: true, cell: (replica) => <Time at={replica.since} /> },
];
