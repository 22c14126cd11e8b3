/** The conversation: each turn is a prompt, the answer so far and what was measured. */
import type { ChatMessage, StreamFrame } from "@/api/stream";

export type TurnPhase = "waiting" | "streaming" | "done" | "stopped" | "failed";

export interface Turn {
  id: number;
  prompt: string;
  answer: string;
  phase: TurnPhase;
  sentAt: number;
  firstAt: number | null;
  lastAt: number | null;
  numTokens: number;
  numPromptTokens: number | null;
  requestId: string;
  versionId: string;
  node: string;
  finishReason: string;
  error: string;
}

export type TurnAction =
  | { type: "sent"; id: number; prompt: string; at: number }
  | { type: "frame"; id: number; frame: StreamFrame; at: number }
  | { type: "failed"; id: number; message: string }
  | { type: "cleared" };

export function turnsReducer(turns: Turn[], action: TurnAction): Turn[] {
  switch (action.type) {
    case "sent":
      return [...turns, newTurn(action.id, action.prompt, action.at)];
    case "cleared":
      return [];
    case "failed":
      return change(turns, action.id, () => ({ phase: "failed", error: action.message }));
    case "frame":
      return change(turns, action.id, (turn) => afterFrame(turn, action.frame, action.at));
  }
}

function change(turns: Turn[], id: number, part: (turn: Turn) => Partial<Turn>): Turn[] {
  return turns.map((turn) => (turn.id === id ? { ...turn, ...part(turn) } : turn));
}

function newTurn(id: number, prompt: string, sentAt: number): Turn {
  return {
    id,
    prompt,
    sentAt,
    answer: "",
    phase: "waiting",
    firstAt: null,
    lastAt: null,
    numTokens: 0,
    numPromptTokens: null,
    requestId: "",
    versionId: "",
    node: "",
    finishReason: "",
    error: "",
  };
}

function afterFrame(turn: Turn, frame: StreamFrame, at: number): Partial<Turn> {
  switch (frame.type) {
    case "ready":
      return {};
    case "started":
      return {
        requestId: frame.request_id,
        versionId: frame.version_id,
        node: frame.node ?? "",
      };
    case "delta":
      return {
        phase: "streaming",
        answer: turn.answer + frame.text,
        numTokens: turn.numTokens + frame.num_tokens,
        firstAt: turn.firstAt ?? at,
        lastAt: at,
      };
    case "error":
      return { phase: "failed", error: frame.error.message };
    case "done":
      return {
        phase: frame.finish_reason === "cancelled" ? "stopped" : "done",
        finishReason: frame.finish_reason ?? "",
        numTokens: frame.usage.completion_tokens || turn.numTokens,
        numPromptTokens: frame.usage.prompt_tokens,
        lastAt: at,
      };
  }
}

/** Milliseconds from sending to the first token, as this browser saw it. */
export function ttft({ sentAt, firstAt }: Turn): number | null {
  return firstAt === null ? null : firstAt - sentAt;
}

/** Tokens per second after the first token. */
export function tokensPerSecond({ firstAt, lastAt, numTokens }: Turn): number | null {
  if (firstAt === null || lastAt === null || numTokens < 2 || lastAt <= firstAt) return null;
  return ((numTokens - 1) * 1_000) / (lastAt - firstAt);
}

export function isRunning(turn: Turn | undefined): boolean {
  return turn?.phase === "waiting" || turn?.phase === "streaming";
}

/** What goes to the model: the system prompt, the finished turns and the new prompt. */
export function messagesOf(system: string, turns: Turn[], prompt: string): ChatMessage[] {
  const start: ChatMessage[] = system ? [{ role: "system", content: system }] : [];
  const past = turns
    .filter((turn) => turn.answer !== "" && turn.phase !== "failed")
    .flatMap((turn): ChatMessage[] => [
      { role: "user", content: turn.prompt },
      { role: "assistant", content: turn.answer },
    ]);
  return [...start, ...past, { role: "user", content: prompt }];
}
