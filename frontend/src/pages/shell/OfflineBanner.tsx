import { useNetwork } from "@mantine/hooks";
import { IconPlugConnectedX } from "@tabler/icons-react";
import { useNow } from "@/ui/clock";
import { ago } from "@/ui/format";
import { useLive } from "./LiveContext";
import classes from "./Shell.module.css";

/** Says so when what is shown is no longer live. */
export function OfflineBanner() {
  const live = useLive();
  const now = useNow();
  const { online } = useNetwork();
  const cut = live.phase === "reconnecting" && now - live.heardAt > 2_000;
  if (online && !cut) return null;
  const last = live.heardAt > 0 ? ` Last update ${ago(live.heardAt / 1_000, now)}.` : "";
  return (
    <div role="alert" className={classes.offline}>
      <IconPlugConnectedX size={15} aria-hidden />
      {online ? "The control plane cannot be reached; reconnecting." : "You are offline."}
      {last} What you see may be out of date.
    </div>
  );
}
