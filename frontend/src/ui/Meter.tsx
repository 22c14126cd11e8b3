import type { CSSProperties } from "react";
import classes from "./Meter.module.css";

/** A ratio, 0 to 1, as a thin bar. */
export function Meter({ ratio, label }: { ratio: number; label: string }) {
  const value = Math.round(Math.min(1, Math.max(0, ratio)) * 100);
  const style = { "--fill": "var(--accent)" } as CSSProperties;
  return (
    <div role="img" aria-label={`${label} ${value} %`} className={classes.meter} style={style}>
      <div className={classes.fill} style={{ width: `${value}%` }} />
    </div>
  );
}

export interface Segment {
  key: string;
  label: string;
  value: number;
  color?: string;
  faded?: boolean;
}

/** How a segment without a colour is drawn, for legends. */
export const hatched = classes.foreign ?? "";

/** Parts of a whole side by side; what is left is free. */
export function StackBar(props: { label: string; total: number; segments: Segment[] }) {
  const { label, total, segments } = props;
  return (
    <div role="img" aria-label={label} className={classes.stack}>
      {segments.map((segment) => (
        <div
          key={segment.key}
          title={segment.label}
          className={segmentClass(segment)}
          style={{ width: `${(segment.value / total) * 100}%`, background: segment.color }}
        />
      ))}
    </div>
  );
}

function segmentClass(segment: Segment): string {
  const kind = segment.color ? "" : hatched;
  return `${classes.segment} ${kind} ${segment.faded ? classes.faded : ""}`;
}
