import { useQuery } from "@tanstack/react-query";
import { dispatchQuery } from "@/api/history";
import type { Dispatch, DispatchCandidate, RejectedReplica, RequestDispatch } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { integer, plural, words } from "@/ui/format";
import { Section } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";
import classes from "./Dispatch.module.css";

const MOST = 12; // candidates in the table

/** Why each attempt went where it went: every candidate, each term, and what lost the others. */
export function DispatchSection({ requestId }: { requestId: string }) {
  const dispatch = useQuery(dispatchQuery(requestId));
  const found = dispatch.data;
  return (
    <Section title="Why this replica">
      <Async query={dispatch}>
        {found?.dispatches.length === 0 && <NotKept found={found} />}
        {found?.dispatches.map((one) => (
          <OneDispatch
            key={`${one.choice}.${one.attempt}`}
            dispatch={one}
            alone={found.dispatches.length === 1}
            whole={found.is_whole}
          />
        ))}
      </Async>
    </Section>
  );
}

function NotKept({ found }: { found: RequestDispatch }) {
  if (found.outcome === "running") {
    return <Empty title="Not known yet">It is put on record when the request has ended.</Empty>;
  }
  const share = percent(found.share);
  const title = found.is_sampled ? "Not kept" : `Not kept: the sampled share is ${share}`;
  return (
    <Empty title={title}>
      {found.is_sampled
        ? "This request never came to a choice of replicas, or was recorded under another share."
        : "One request a second is kept beside, and attempts that follow a lost one, and requests that no replica took. Set ENGINE_DISPATCH_EXPLAINED on the gateways to keep more."}
    </Empty>
  );
}

/** `percent(0.01) === "1 %"`. */
export function percent(share: number): string {
  return `${Number((share * 100).toPrecision(3))} %`;
}

interface OneDispatchProps {
  dispatch: Dispatch;
  alone: boolean;
  whole: boolean;
}

function OneDispatch({ dispatch, alone, whole }: OneDispatchProps) {
  const { candidates, rejected } = dispatch;
  return (
    <div className={classes.one}>
      {!alone && (
        <span className={classes.soft}>
          Choice {dispatch.choice}, attempt {dispatch.attempt}
        </span>
      )}
      <p className={classes.sentence}>{headline(dispatch)}</p>
      {dispatch.why !== "sampled" && dispatch.why !== "spare" && (
        <span>{dispatch.sentences[0]}</span>
      )}
      {candidates.length > 0 && <Candidates dispatch={dispatch} />}
      {rejected.length > 0 && (
        <DataTable
          label={`Ruled out of attempt ${dispatch.attempt}`}
          columns={RULED_OUT}
          rows={rejected}
          rowKey={(one) => one.replica_id}
        />
      )}
      {!whole && (
        <span className={classes.soft}>
          What the other {plural(dispatch.num_replicas - candidates.length, "replica")} did is not
          shown: it is other tenants' load.
        </span>
      )}
      <Provenance dispatch={dispatch} />
    </div>
  );
}

function headline({ replica_id, node_id, num_candidates, num_replicas }: Dispatch): string {
  const of = plural(num_replicas, "replica");
  if (num_candidates === 0) return `None of ${of} could take the request.`;
  const chosen = `${replica_id} on ${node_id}`;
  if (num_candidates === 1) return `${chosen} was the only one of ${of} that could take it.`;
  return `${chosen} costs least of the ${num_candidates} that could take it, of ${of}.`;
}

function Candidates({ dispatch }: { dispatch: Dispatch }) {
  const { candidates, attempt, weights, num_candidates } = dispatch;
  const more = num_candidates - MOST;
  return (
    <>
      <DataTable
        label={`Candidates of attempt ${attempt}`}
        columns={columns(dispatch)}
        rows={candidates.slice(0, MOST)}
        rowKey={(one) => one.replica_id}
        isMarked={(one) => one === candidates[0]}
      />
      {candidates.length > MOST && (
        <span className={classes.soft}>{integer(more)} more cost more.</span>
      )}
      <span className={classes.legend}>
        Queue, prefill and decode are estimated seconds. Latency = α {weights.alpha} · (
        {latencyOf(candidates)}), use = β {weights.beta} · utilisation, loading = γ {weights.gamma}{" "}
        · seconds; cost is the sum of the three.
      </span>
    </>
  );
}

/** In the words of the columns that are there. */
function latencyOf(candidates: DispatchCandidate[]): string {
  const sum = candidates.some(isHot) ? "their sum / heat" : "their sum";
  return candidates.some(isFar) ? `${sum} + distance` : sum;
}

const isHot = ({ terms }: DispatchCandidate) => terms.thermal < 1;
const isFar = ({ terms }: DispatchCandidate) => terms.distance_s > 0;

function Replica({ one }: { one: { replica_id: string; node_id: string } }) {
  return (
    <span className={classes.replica}>
      <span className="mono">{one.replica_id}</span>
      <RouterAnchor to="/fleet" search={{ node: one.node_id }}>
        {one.node_id}
      </RouterAnchor>
    </span>
  );
}

function columns({ candidates, replicas }: Dispatch): Column<DispatchCandidate>[] {
  const [best] = candidates;
  const term = (title: string, name: keyof DispatchCandidate["terms"], minor = false) => ({
    title,
    right: true,
    minor,
    cell: ({ terms }: DispatchCandidate) => terms[name].toFixed(3),
  });
  const cached = new Map(replicas.map((one) => [one.replica_id, one.num_cached_tokens]));
  const hot = candidates.some(isHot);
  const far = candidates.some(isFar);
  const loads = candidates.some(({ terms }) => terms.loading > 0);
  const hits = candidates.some(({ replica_id }) => cached.get(replica_id));
  return [
    { title: "Replica", cell: (one) => <Replica one={one} /> },
    ...(hits ? [tokens("Cached", cached)] : []),
    term("Queue", "queue_s", true),
    term("Prefill", "prefill_s", true),
    term("Decode", "decode_s", true),
    ...(hot ? [term("Heat", "thermal", true)] : []),
    ...(far ? [term("Distance", "distance_s", true)] : []),
    term("Latency", "latency"),
    term("Use", "utilization"),
    ...(loads ? [term("Loading", "loading")] : []),
    { title: "Cost", right: true, cell: (one) => <b>{one.cost.toFixed(3)}</b> },
    { title: "Verdict", cell: (one) => <Verdict one={one} best={best} /> },
  ];
}

function tokens(title: string, counts: Map<string, number>): Column<DispatchCandidate> {
  return {
    title,
    right: true,
    minor: true,
    cell: ({ replica_id }) => integer(counts.get(replica_id) ?? 0),
  };
}

function Verdict(props: { one: DispatchCandidate; best: DispatchCandidate | undefined }) {
  const { one, best } = props;
  if (best === undefined || one === best) return <Status value="ready" label="Chosen" />;
  const more = one.cost - best.cost;
  if (more > 0) return <span className={classes.soft}>{more.toFixed(3)} dearer</span>;
  const less = one.health < best.health ? "less healthy" : "later by name";
  return <span className={classes.soft}>Same cost, {less}</span>;
}

const RULES: Record<string, string> = {
  failed_before: "Failed this request before",
  kv_too_small: "KV cache too small",
  node_absent: "Its node is unknown",
  node_draining: "Its node is draining",
  node_lost: "Its node is lost",
  node_suspect: "Its node is silent",
  not_ready: "Not ready",
  not_resident: "Would be loaded too late",
  stale: "Not heard of lately",
  too_hot: "Too hot",
};

const RULED_OUT: Column<RejectedReplica>[] = [
  { title: "Ruled out", cell: (one) => <Replica one={one} /> },
  {
    title: "Rule",
    cell: (one) => <Status value="refused" label={RULES[one.code] ?? words(one.code)} />,
  },
  { title: "Because", cell: (one) => one.detail },
];

function Provenance({ dispatch }: { dispatch: Dispatch }) {
  const { recomputed, position } = dispatch;
  const verdict = recomputed.equal
    ? (["ready", "equal", "chosen again from what it saw: the same, bit for bit"] as const)
    : recomputed.comparable
      ? (["failed", "different", "chosen again from what it saw, it comes out otherwise"] as const)
      : (["pending", "different", "another formula chose, so this proves nothing"] as const);
  const [value, label, text] = verdict;
  return (
    <span className={classes.soft}>
      <Status value={value} label={label} /> {text}. Log position{" "}
      <RouterAnchor to="/events" search={{ open: position }}>
        {integer(position)}
      </RouterAnchor>
      .
    </span>
  );
}
