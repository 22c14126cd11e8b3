import type { ErrorComponentProps } from "@tanstack/react-router";
import { Page } from "./Page";
import { ProblemAlert } from "./ProblemAlert";

export function PageError({ error, reset }: ErrorComponentProps) {
  return (
    <Page title="This page failed">
      <ProblemAlert error={error} onRetry={reset} />
    </Page>
  );
}
