import { CopyButton } from "./CopyButton";
import classes from "./Json.module.css";

export function Json({ value, label }: { value: unknown; label: string }) {
  return <Code text={JSON.stringify(value, null, 2)} label={label} />;
}

export function Code({ text, label }: { text: string; label: string }) {
  return (
    <section className={classes.json} aria-label={label}>
      <pre>{text}</pre>
      <span className={classes.copy}>
        <CopyButton value={text} label={`Copy ${label}`} />
      </span>
    </section>
  );
}
