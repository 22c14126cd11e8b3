import { Alert, Button, List, Text } from "@mantine/core";
import { IconAlertTriangle } from "@tabler/icons-react";
import { asProblem, type Problem } from "@/api/problem";

function isChangedMeanwhile(problem: Problem): boolean {
  return problem.status === 412 || problem.code === "version_conflict";
}

/** What went wrong, in the server's words, with the code and id that support will ask for. */
export function ProblemAlert({ error, onRetry }: { error: unknown; onRetry?: () => void }) {
  const problem = asProblem(error);
  const changed = isChangedMeanwhile(problem);
  const title = changed ? "Changed meanwhile" : problem.title;
  return (
    <Alert color="red" variant="light" icon={<IconAlertTriangle size={16} />} title={title}>
      <Text size="sm">
        {changed
          ? "Somebody else saved a change after you opened this. Nothing was overwritten."
          : problem.detail}
      </Text>
      <FieldProblems problem={problem} />
      <ProblemFacts problem={problem} />
      {onRetry && (
        <Button mt="xs" variant="default" onClick={onRetry}>
          {changed ? "Load the current state" : "Try again"}
        </Button>
      )}
    </Alert>
  );
}

function FieldProblems({ problem }: { problem: Problem }) {
  if (problem.errors.length === 0) return null;
  return (
    <List size="sm" mt={4}>
      {problem.errors.map((error) => (
        <List.Item key={`${error.pointer}${error.detail}`}>
          <span className="mono">{error.pointer}</span> {error.detail}
        </List.Item>
      ))}
    </List>
  );
}

function ProblemFacts({ problem }: { problem: Problem }) {
  const facts = [problem.status || "", problem.code, problem.request_id].filter(Boolean);
  if (facts.length === 0) return null;
  return (
    <Text size="xs" c="dimmed" mt={4} className="mono">
      {facts.join(" · ")}
    </Text>
  );
}
