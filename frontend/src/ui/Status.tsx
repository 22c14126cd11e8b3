import type { CSSProperties } from "react";
import { words } from "./format";
import classes from "./Status.module.css";

export type Tone = "good" | "busy" | "warn" | "bad" | "idle";

const TONES: Record<string, Tone> = {
  ready: "good",
  ok: "good",
  done: "good",
  active: "good",
  live: "good",
  pending: "busy",
  downloading: "busy",
  loading: "busy",
  connecting: "busy",
  running: "busy",
  draining: "warn",
  stopping: "warn",
  suspect: "warn",
  unplaced: "warn",
  suspended: "warn",
  timeout: "warn",
  reconnecting: "warn",
  failed: "bad",
  stuck: "bad",
  refused: "bad",
  lost: "bad",
  error: "bad",
  offline: "bad",
};

export function toneOf(status: string): Tone {
  return TONES[status] ?? "idle";
}

export function toneColor(tone: Tone): string {
  return `var(--tone-${tone})`;
}

/** A state as a dot and a word; never colour alone. */
export function Status({ value, label }: { value: string; label?: string }) {
  const tone = toneOf(value);
  const style = { "--tone": toneColor(tone) } as CSSProperties;
  return (
    <span className={`${classes.status} ${tone === "busy" ? classes.pulse : ""}`} style={style}>
      <span className={classes.dot} aria-hidden />
      {label ?? words(value)}
    </span>
  );
}
