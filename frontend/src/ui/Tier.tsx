import { useTelemetry } from "@/api/telemetry";
import type { Replica } from "@/api/types";
import { absolute, words } from "./format";
import { Time } from "./Time";

const MEANINGS: Record<string, string> = {
  resident: "On its device",
  host: "In the node's memory, swapped in when it is asked for",
  storage: "In files, loaded when it is asked for",
  warm: "Placed beyond its device's memory, swapped in when it is asked for",
};

/** What the planner calls warm is the host tier of a node. */
const PLACED_AS: Record<string, string> = { warm: "host" };

interface Where {
  tier: string;
  since: number | null;
}

/** Where a replica's weights are now, as its node says; of the past and of silent nodes, nothing. */
function useLiveTier(replica: Replica): Where | null {
  const report = useTelemetry(replica.node_id);
  const said = report?.replicas.find((each) => each.replica_id === replica.replica_id);
  if (said?.tier) return { tier: said.tier, since: said.tier_since || null };
  if (!replica.live_tier) return null;
  return { tier: replica.live_tier, since: replica.live_tier_since };
}

/** In a line: where it is now, and where it is placed if that is another tier. */
export function Tier({ replica }: { replica: Replica }) {
  const live = useLiveTier(replica);
  const placed = <span title={placedTitle(replica)}>{words(replica.tier)}</span>;
  if (live === null) return placed;
  return (
    <>
      <span title={liveTitle(live)}>{words(live.tier)}</span>
      {isElsewhere(live, replica) && (
        <span title={placedTitle(replica)}>, {placedText(replica)}</span>
      )}
    </>
  );
}

/** The same with since when, for a table's cell. */
export function LiveTier({ replica }: { replica: Replica }) {
  const live = useLiveTier(replica);
  if (live === null) return <>–</>;
  return (
    <span title={MEANINGS[live.tier]}>
      {words(live.tier)} {live.since !== null && <Time at={live.since} />}
    </span>
  );
}

export function PlacedTier({ replica }: { replica: Replica }) {
  return (
    <span title={replica.tier_reason || MEANINGS[replica.tier]}>
      {words(replica.tier)} <Time at={replica.tier_since} />
    </span>
  );
}

function isElsewhere(live: Where, replica: Replica): boolean {
  return (PLACED_AS[replica.tier] ?? replica.tier) !== live.tier;
}

function placedText(replica: Replica): string {
  return `placed ${words(replica.tier)}`;
}

function liveTitle({ tier, since }: Where): string {
  return since === null ? (MEANINGS[tier] ?? "") : `${MEANINGS[tier]}, since ${absolute(since)}`;
}

function placedTitle(replica: Replica): string {
  const since = `Placed so since ${absolute(replica.tier_since)}`;
  return `${replica.tier_reason || MEANINGS[replica.tier]} ${since}`;
}
