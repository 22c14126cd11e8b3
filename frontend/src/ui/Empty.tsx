import { Title } from "@mantine/core";
import type { ReactNode } from "react";
import { CopyButton } from "./CopyButton";
import classes from "./Empty.module.css";

interface EmptyProps {
  title: string;
  children: ReactNode;
  command?: string;
  action?: ReactNode;
}

/** Nothing to show, and the exact next step to change that. */
export function Empty({ title, children, command, action }: EmptyProps) {
  return (
    <div className={classes.empty}>
      <Title order={2}>{title}</Title>
      <p>{children}</p>
      {command && (
        <div className={classes.command}>
          <code className="mono">{command}</code>
          <CopyButton value={command} label="Copy command" />
        </div>
      )}
      {action}
    </div>
  );
}
