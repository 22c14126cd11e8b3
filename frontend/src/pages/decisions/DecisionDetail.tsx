import type { Candidate, Decision, Rejection, Started } from "@/api/types";
import { type Column, DataTable } from "@/ui/DataTable";
import { integer } from "@/ui/format";
import { Id } from "@/ui/Id";
import { RouterAnchor } from "@/ui/RouterAnchor";
import classes from "./Decisions.module.css";
import { Recomputed } from "./Recomputed";
import {
  byScore,
  device,
  rejectionSentence,
  retieredSentence,
  startedSentence,
  stoppedSentence,
  termLabel,
  termNames,
  termValue,
  unplacedSentence,
} from "./sentences";

export function DecisionDetail({ decision }: { decision: Decision }) {
  return (
    <div className={classes.detail}>
      {decision.started.map((started) => (
        <StartedPart key={started.assignment.replica_id} started={started} />
      ))}
      {decision.stopped.map((stopped) => (
        <p key={stopped.assignment.replica_id} className={classes.sentence}>
          {stoppedSentence(stopped)}
        </p>
      ))}
      {decision.retiered.map((retiered) => (
        <p key={retiered.assignment.replica_id} className={classes.sentence}>
          {retieredSentence(retiered)}
        </p>
      ))}
      {decision.unplaced.map((unplaced) => (
        <div key={unplaced.version_id}>
          <p className={classes.sentence}>{unplacedSentence(unplaced)}</p>
          <Rejections rejections={unplaced.rejections} />
        </div>
      ))}
      <Provenance decision={decision} />
      <Recomputed decisionId={decision.decision_id} />
    </div>
  );
}

function Provenance({ decision }: { decision: Decision }) {
  return (
    <span className={classes.soft}>
      Planned from log position {integer(decision.planned_from)}, recorded at{" "}
      <RouterAnchor to="/events" search={{ stream: "placement", open: decision.position }}>
        {integer(decision.position)}
      </RouterAnchor>
      , decision <Id value={decision.decision_id} />
    </span>
  );
}

function StartedPart({ started }: { started: Started }) {
  const { assignment, candidates, rejections } = started;
  const rows = byScore(candidates);
  return (
    <div>
      <p className={classes.sentence}>{startedSentence(started)}</p>
      {rows.length > 0 && (
        <DataTable
          label={`Candidates for ${assignment.replica_id}`}
          columns={columns(rows, device(assignment.node_id, assignment.device_index))}
          rows={rows}
          rowKey={(candidate) => device(candidate.node_id, candidate.device_index)}
        />
      )}
      <Rejections rejections={rejections} />
    </div>
  );
}

function columns(candidates: Candidate[], chosen: string): Column<Candidate>[] {
  const terms = termNames(candidates).map((name) => ({
    title: termLabel(name),
    right: true,
    minor: true,
    cell: (candidate: Candidate) => termValue(candidate.terms, name),
  }));
  const place = ({ node_id, device_index }: Candidate) => device(node_id, device_index);
  return [
    { title: "Candidate", cell: (candidate) => <span className="mono">{place(candidate)}</span> },
    ...terms,
    { title: "Score", right: true, cell: (candidate) => candidate.score.toFixed(3) },
    { title: "", cell: (candidate) => (place(candidate) === chosen ? "chosen" : "") },
  ];
}

function Rejections({ rejections }: { rejections: Rejection[] }) {
  if (rejections.length === 0) return null;
  return (
    <ul className={classes.rejections} aria-label="Ruled out">
      {rejections.map((rejection) => (
        <li key={`${rejection.node_id}:${rejection.device_index} ${rejection.code}`}>
          {rejectionSentence(rejection)}
        </li>
      ))}
    </ul>
  );
}
