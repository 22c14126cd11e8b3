import { useCallback, useEffect, useReducer, useRef } from "react";
import { asProblem } from "@/api/problem";
import { type ChatRequest, type RunningStream, streamChat } from "@/api/stream";
import { issueTicket } from "@/api/tenants";
import { isRunning, type Turn, type TurnAction, turnsReducer } from "./turns";

export interface Conversation {
  turns: Turn[];
  running: boolean;
  send(tenant: string, prompt: string, request: ChatRequest): void;
  stop(): void;
  clear(): void;
}

/** Each answer has a fresh ticket and connection of its own; one runs at a time. */
export function useConversation(): Conversation {
  const [turns, dispatch] = useReducer(turnsReducer, []);
  const stream = useRef<RunningStream | null>(null);
  const nextId = useRef(1);
  const unwanted = useRef(false); // stopped before its stream was open
  const stop = useCallback(() => {
    unwanted.current = true;
    stream.current?.stop();
  }, []);
  useEffect(() => stop, [stop]);
  const send = (tenant: string, prompt: string, request: ChatRequest) => {
    const id = nextId.current++;
    unwanted.current = false;
    dispatch({ type: "sent", id, prompt, at: performance.now() });
    void openStream(id, tenant, request, dispatch).then((opened) => {
      stream.current = opened;
      if (unwanted.current) opened?.stop();
    });
  };
  return {
    turns,
    running: isRunning(turns.at(-1)),
    send,
    stop,
    clear: () => dispatch({ type: "cleared" }),
  };
}

async function openStream(
  id: number,
  tenant: string,
  request: ChatRequest,
  dispatch: (action: TurnAction) => void,
): Promise<RunningStream | null> {
  try {
    const ticket = await issueTicket(tenant);
    return streamChat(ticket, request, {
      onFrame: (frame) => dispatch({ type: "frame", id, frame, at: performance.now() }),
      onClose: (message) => dispatch({ type: "failed", id, message }),
    });
  } catch (error) {
    dispatch({ type: "failed", id, message: asProblem(error).detail });
    return null;
  }
}
