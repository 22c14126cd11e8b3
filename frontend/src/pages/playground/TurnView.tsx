import { Alert } from "@mantine/core";
import { integer, millis, rate } from "@/ui/format";
import { RouterAnchor } from "@/ui/RouterAnchor";
import classes from "./Playground.module.css";
import { isRunning, type Turn, tokensPerSecond, ttft } from "./turns";

export function TurnView({ turn }: { turn: Turn }) {
  const running = isRunning(turn);
  return (
    <article aria-label={`Turn ${turn.id}`} aria-busy={running}>
      <p className={classes.prompt}>{turn.prompt}</p>
      <p className={`${classes.answer} ${running ? classes.cursor : ""}`}>{turn.answer}</p>
      {turn.error && (
        <Alert color="red" mt="xs">
          {turn.error}
        </Alert>
      )}
      <Stats turn={turn} />
    </article>
  );
}

function Stats({ turn }: { turn: Turn }) {
  return (
    <p className={classes.stats}>
      <span>
        TTFT <b>{millis(ttft(turn))}</b>
      </span>
      <span>
        <b>{rate(tokensPerSecond(turn))}</b> tok/s
      </span>
      <span>
        <b>{integer(turn.numTokens)}</b> tokens
        {turn.numPromptTokens !== null && ` after ${integer(turn.numPromptTokens)} of prompt`}
      </span>
      {turn.versionId && <span className="mono">{turn.versionId}</span>}
      {turn.node && <span>on {turn.node}</span>}
      {turn.phase === "stopped" && <span>stopped</span>}
      {turn.finishReason === "length" && <span>cut at the token limit</span>}
      {turn.requestId && !isRunning(turn) && (
        <RouterAnchor to="/requests" search={{ open: turn.requestId }} fz="xs">
          record
        </RouterAnchor>
      )}
    </p>
  );
}
