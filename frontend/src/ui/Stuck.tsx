import { useNow } from "./clock";
import { inSeconds } from "./format";
import { Status } from "./Status";
import classes from "./Status.module.css";
import { Time } from "./Time";

interface StuckFacts {
  stuck_since: number | null;
  stuck_code: string;
  stuck_reason: string;
}

/** What should have moved by now, since when it has not, and why; nothing where all is well. */
export function Stuck({ of, label = "stuck" }: { of: StuckFacts; label?: string }) {
  if (of.stuck_since === null) return null;
  return (
    <div className={classes.stuck} role="status">
      <Status value="stuck" label={label} /> <Time at={of.stuck_since} />
      {": "}
      {of.stuck_reason || of.stuck_code}
    </div>
  );
}

interface Standing {
  reason: string;
  retry_at: number | null;
}

/** Why a version is not ready, and when what failed is tried again; empty where all is well. */
function useReason({ reason, retry_at }: Standing): string {
  const now = useNow();
  if (retry_at === null) return reason;
  const sentence = reason.trimEnd().replace(/[^.]$/, "$&.");
  return `${sentence} Next try ${inSeconds(retry_at, now)}.`.trimStart();
}

export function Reason({ of }: { of: Standing }) {
  return useReason(of) || "–";
}

/** The same in one line under a status, all of it on hover. */
export function ReasonLine({ of }: { of: Standing }) {
  const text = useReason(of);
  if (!text) return null;
  return (
    <div className={classes.reason} title={text}>
      {text}
    </div>
  );
}
