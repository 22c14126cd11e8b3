import { useTelemetry } from "@/api/telemetry";
import type { Replica } from "@/api/types";
import { words } from "./format";

const MEANINGS: Record<string, string> = {
  resident: "On its device",
  host: "In the node's memory, swapped in when it is asked for",
  storage: "In files, loaded when it is asked for",
  warm: "Placed beyond its device's memory, swapped in when it is asked for",
};

/** Where a replica's weights are now, as its node says; of the past, how it was placed. */
export function Tier({ replica }: { replica: Replica }) {
  const report = useTelemetry(replica.node_id);
  const said = report?.replicas.find((each) => each.replica_id === replica.replica_id)?.tier;
  const tier = said || replica.tier;
  return <span title={MEANINGS[tier]}>{words(tier)}</span>;
}
