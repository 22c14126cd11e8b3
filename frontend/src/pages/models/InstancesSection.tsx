import { useQuery } from "@tanstack/react-query";
import { placementsQuery } from "@/api/fleet";
import type { Model, Replica } from "@/api/types";
import { type Column, DataTable } from "@/ui/DataTable";
import { bytes } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Section } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";
import { Stuck } from "@/ui/Stuck";
import { LiveTier, PlacedTier } from "@/ui/Tier";
import { Time } from "@/ui/Time";

/** Where the model's replicas run; absent while it has none. */
export function InstancesSection({ model }: { model: Model }) {
  const ids = new Set(model.versions.map((version) => version.version_id));
  const rows = useQuery(placementsQuery).data?.filter((each) => ids.has(each.version_id)) ?? [];
  if (rows.length === 0) return null;
  return (
    <Section title="Replicas">
      <DataTable
        label="Replicas"
        columns={COLUMNS}
        rows={rows}
        rowKey={(replica) => replica.replica_id}
      />
    </Section>
  );
}

function Why({ replica }: { replica: Replica }) {
  if (replica.stuck_since !== null) return <Stuck of={replica} />;
  return replica.waiting || replica.reason || "–";
}

const COLUMNS: Column<Replica>[] = [
  { title: "Replica", cell: (replica) => <Id value={replica.replica_id} /> },
  { title: "State", cell: (replica) => <Status value={replica.state} /> },
  { title: "Tier now", cell: (replica) => <LiveTier replica={replica} /> },
  { title: "Placed in", minor: true, cell: (replica) => <PlacedTier replica={replica} /> },
  {
    title: "Node",
    cell: ({ node_id, device_index }) => (
      <RouterAnchor to="/fleet" search={{ node: node_id }} className="mono">
        {node_id}/{device_index}
      </RouterAnchor>
    ),
  },
  { title: "Memory", right: true, cell: (replica) => bytes(replica.memory_bytes) },
  { title: "Since", minor: true, cell: (replica) => <Time at={replica.since} /> },
  { title: "Reason", minor: true, cell: (replica) => <Why replica={replica} /> },
];
