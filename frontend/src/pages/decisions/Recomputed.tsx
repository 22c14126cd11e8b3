import { Button } from "@mantine/core";
import { IconRefreshDot } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { replayQuery } from "@/api/history";
import type { Replay } from "@/api/types";
import { Async } from "@/ui/Async";
import { integer, plural } from "@/ui/format";
import { Status } from "@/ui/Status";
import classes from "./Decisions.module.css";

/** Asks the planner of this release to decide again from what was recorded. */
export function Recomputed({ decisionId }: { decisionId: string }) {
  const [asked, setAsked] = useState(false);
  const replay = useQuery({ ...replayQuery(decisionId), enabled: asked });
  if (!asked) {
    return (
      <div>
        <Button
          variant="default"
          size="compact-sm"
          leftSection={<IconRefreshDot size={14} />}
          onClick={() => setAsked(true)}
        >
          Recompute
        </Button>
      </div>
    );
  }
  return <Async query={replay}>{replay.data && <Verdict replay={replay.data} />}</Async>;
}

function Verdict({ replay }: { replay: Replay }) {
  if (replay.equal) {
    return (
      <p className={classes.sentence}>
        <Status value="ready" label="equal" /> Decided again from log position{" "}
        {integer(replay.planned_from)} and the recorded telemetry: the same, bit for bit.
      </p>
    );
  }
  const [value, text] = replay.inputs_recorded
    ? (["failed", "The planner of this release decides otherwise"] as const)
    : (["pending", "Its telemetry was not recorded then, so this proves nothing"] as const);
  return (
    <div>
      <p className={classes.sentence}>
        <Status value={value} label="different" /> {text}:{" "}
        {plural(replay.differences.length, "difference")}.
      </p>
      <ul className={classes.rejections} aria-label="Differences">
        {replay.differences.map((one) => (
          <li key={one.path}>
            <span className="mono">{one.path}</span>: {JSON.stringify(one.stored)} stored,{" "}
            {JSON.stringify(one.replayed)} now
          </li>
        ))}
      </ul>
    </div>
  );
}
