import { CopyButton } from "./CopyButton";
import classes from "./Id.module.css";

/** An identifier: monospaced, and copied with one click. */
export function Id({ value, short }: { value: string; short?: number }) {
  const shown = short && value.length > short + 1 ? `${value.slice(0, short)}…` : value;
  return (
    <span className={classes.id}>
      <span className={`mono ${classes.text}`} title={value}>
        {shown}
      </span>
      <span className={classes.copy}>
        <CopyButton value={value} label={`Copy ${value}`} />
      </span>
    </span>
  );
}
