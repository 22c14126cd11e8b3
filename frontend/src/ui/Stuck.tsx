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

/** Why a version is not ready, and when what failed is tried again. */
export function Reason({ of }: { of: Standing }) {
  const now = useNow();
  if (!of.reason && of.retry_at === null) return "–";
  if (of.retry_at === null) return of.reason;
  const sentence = of.reason.trimEnd().replace(/[^.]$/, "$&.");
  return `${sentence} Next try ${inSeconds(of.retry_at, now)}.`;
}
