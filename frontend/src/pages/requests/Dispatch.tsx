import { useQuery } from "@tanstack/react-query";
import { dispatchQuery } from "@/api/history";
import type { Dispatch, DispatchCandidate, RequestDispatch } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Column, DataTable } from "@/ui/DataTable";
import { Empty } from "@/ui/Empty";
import { integer, plural } from "@/ui/format";
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
  const title = found.is_sampled ? "Not kept" : `Not sampled: the share is ${share}`;
  return (
    <Empty title={title}>
      {found.is_sampled
        ? "This request never came to a choice of replicas, or was recorded under another share."
        : "Attempts that follow a lost one, and requests that no replica took, are kept as well. Set ENGINE_DISPATCH_EXPLAINED on the gateways to keep more."}
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
  const told = dispatch.sentences.slice(0, dispatch.why === "sampled" ? 1 : 2);
  return (
    <div className={classes.one}>
      {!alone && (
        <span className={classes.soft}>
          Choice {dispatch.choice}, attempt {dispatch.attempt}
        </span>
      )}
      {told.map((sentence) => (
        <p key={sentence} className={classes.sentence}>
          {sentence}
        </p>
      ))}
      {candidates.length > 0 && (
        <DataTable
          label={`Candidates of attempt ${dispatch.attempt}`}
          columns={columns(candidates)}
          rows={candidates.slice(0, MOST)}
          rowKey={(one) => one.replica_id}
        />
      )}
      {candidates.length > MOST && (
        <span className={classes.soft}>{integer(candidates.length - MOST)} more cost more.</span>
      )}
      {rejected.length > 0 && (
        <ul className={classes.rejections} aria-label="Ruled out">
          {rejected.map((one) => (
            <li key={one.replica_id}>
              <span className="mono">{one.replica_id}</span> on {one.node_id}: {one.detail} (
              {one.code})
            </li>
          ))}
        </ul>
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

function columns(candidates: DispatchCandidate[]): Column<DispatchCandidate>[] {
  const [best] = candidates;
  const term = (title: string, name: keyof DispatchCandidate["terms"], minor = false) => ({
    title,
    right: true,
    minor,
    cell: ({ terms }: DispatchCandidate) => terms[name].toFixed(3),
  });
  const hot = candidates.some(({ terms }) => terms.thermal < 1);
  const far = candidates.some(({ terms }) => terms.distance_s > 0);
  const loads = candidates.some(({ terms }) => terms.loading > 0);
  return [
    {
      title: "Replica",
      cell: (one) => (
        <>
          <span className="mono">{one.replica_id}</span>{" "}
          <RouterAnchor to="/fleet" search={{ node: one.node_id }}>
            {one.node_id}
          </RouterAnchor>
        </>
      ),
    },
    term("Queue", "queue_s", true),
    term("Prefill", "prefill_s", true),
    term("Decode", "decode_s", true),
    ...(hot ? [term("Heat", "thermal", true)] : []),
    ...(far ? [term("Distance", "distance_s", true)] : []),
    term("Latency", "latency"),
    term("Use", "utilization"),
    ...(loads ? [term("Loading", "loading")] : []),
    { title: "Cost", right: true, cell: (one) => one.cost.toFixed(3) },
    { title: "", cell: (one) => (one === best ? "chosen" : "") },
  ];
}

function Provenance({ dispatch }: { dispatch: Dispatch }) {
  const { weights, recomputed, position } = dispatch;
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
      ; weights α {weights.alpha}, β {weights.beta}, γ {weights.gamma}.
    </span>
  );
}
