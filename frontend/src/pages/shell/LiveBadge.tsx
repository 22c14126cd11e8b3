import { Tooltip } from "@mantine/core";
import { useEffect, useState } from "react";
import { integer } from "@/ui/format";
import { Status } from "@/ui/Status";
import { useLive } from "./LiveContext";
import classes from "./Shell.module.css";

function useAge(since: number): number {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 200);
    return () => clearInterval(timer);
  }, []);
  return Math.max(0, (now - since) / 1_000);
}

/** "live · position 123 · 0.4 s": the log position that is shown, and when it was last confirmed. */
export function LiveBadge() {
  const live = useLive();
  const age = useAge(live.heardAt);
  const isLive = live.phase === "live";
  const facts = isLive ? ` · position ${integer(live.position)} · ${age.toFixed(1)} s` : "";
  return (
    <Tooltip label="Position of the newest event shown, and seconds since the server confirmed it">
      <output className={classes.live} aria-label="Live connection" aria-live="off">
        <Status value={live.phase} label={isLive ? "live" : live.phase} />
        <span className={classes.liveFacts}>{facts}</span>
      </output>
    </Tooltip>
  );
}
