/**
 * One websocket to `/ws/live`, resumable by log position.
 *
 * Worked example: the link has seen position 120 and the socket drops. It reconnects (0.5 s, 1 s,
 * 2 s ... 15 s, jittered) and subscribes with `after: 120`; the server sends 121, 122, ... and
 * nothing is lost. If it answers `reset`, or a position is skipped, the page's data is refetched
 * instead of patched. Five silent seconds count as a dropped socket (heartbeats come every second).
 */
import { parseLive, type Telemetry } from "./liveMessages";
import type { LogEvent } from "./types";

export type LivePhase = "connecting" | "live" | "reconnecting" | "stopped";

export interface LiveState {
  phase: LivePhase;
  position: number | null;
  /** When the last frame came, in the browser's own clock (ms), so skewed clocks do no harm. */
  heardAt: number;
}

export interface LiveHandlers {
  onEvent(event: LogEvent): void;
  onTelemetry(telemetry: Telemetry): void;
  /** What is shown may have missed something up to `position`: fetch it again. */
  onReset(position: number): void;
  onUnauthorized(): void;
}

const SILENCE_MS = 5_000;
const UNAUTHORIZED = 4401;

export class LiveLink {
  private state: LiveState = { phase: "stopped", position: null, heardAt: 0 };
  private readonly listeners = new Set<() => void>();
  private socket: WebSocket | null = null;
  private attempt = 0;
  private behind: number | null = null;
  private retry: ReturnType<typeof setTimeout> | undefined;
  private watchdog: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly url: string,
    private readonly handlers: LiveHandlers,
    /** False where the server shows this user only some of the events: gaps are then lawful. */
    private readonly gapless = true,
  ) {}

  subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  snapshot = (): LiveState => this.state;

  start(): void {
    this.update({ phase: "connecting" });
    this.connect();
  }

  stop(): void {
    clearTimeout(this.retry);
    clearTimeout(this.watchdog);
    this.update({ phase: "stopped" });
    this.socket?.close();
    this.socket = null;
  }

  private connect(): void {
    const socket = new WebSocket(this.url);
    this.socket = socket;
    socket.onopen = () => {
      socket.send(JSON.stringify({ type: "subscribe", after: this.state.position }));
      this.listen();
    };
    socket.onmessage = (message) => this.receive(String(message.data));
    socket.onclose = (closing) => this.dropped(socket, closing.code);
  }

  private dropped(socket: WebSocket, code: number): void {
    if (socket !== this.socket || this.state.phase === "stopped") return;
    clearTimeout(this.watchdog);
    if (code === UNAUTHORIZED) {
      this.stop();
      this.handlers.onUnauthorized();
      return;
    }
    this.update({ phase: "reconnecting" });
    this.retry = setTimeout(() => this.connect(), backoff(this.attempt++));
  }

  private receive(text: string): void {
    this.listen();
    const message = parseLive(text);
    if (message === null) return;
    this.attempt = 0;
    switch (message.type) {
      case "hello":
        this.greeted(message.position);
        break;
      case "reset":
        this.refetch(message.position);
        break;
      case "heartbeat":
        this.checkBehind(message.position);
        break;
      case "event":
        this.advance(message.event);
        break;
      case "telemetry":
        this.handlers.onTelemetry(message);
        break;
    }
    this.update({ phase: "live", heardAt: Date.now() });
  }

  private greeted(position: number): void {
    if (this.state.position === null) this.refetch(position);
  }

  private advance(event: LogEvent): void {
    const known = this.state.position;
    if (known !== null && event.position <= known) return;
    if (this.gapless && known !== null && event.position > known + 1) {
      this.refetch(event.position);
      return;
    }
    this.update({ position: event.position });
    this.handlers.onEvent(event);
  }

  /** A heartbeat may overtake its event once; still behind at the next one is a gap. */
  private checkBehind(position: number): void {
    if (!this.gapless) {
      this.update({ position });
      return;
    }
    const known = this.state.position ?? position;
    if (this.behind !== null && known < this.behind) this.refetch(position);
    this.behind = position > (this.state.position ?? position) ? position : null;
  }

  private refetch(position: number): void {
    this.behind = null;
    this.update({ position });
    this.handlers.onReset(position);
  }

  private listen(): void {
    clearTimeout(this.watchdog);
    this.watchdog = setTimeout(() => this.silent(), SILENCE_MS);
  }

  /** A half-open connection never fires `close` in time, so it is replaced rather than awaited. */
  private silent(): void {
    const socket = this.socket;
    if (socket === null) return;
    this.dropped(socket, 0);
    this.socket = null;
    socket.close();
  }

  private update(change: Partial<LiveState>): void {
    this.state = { ...this.state, ...change };
    for (const listener of this.listeners) listener();
  }
}

function backoff(attempt: number): number {
  const ceiling = Math.min(15_000, 500 * 2 ** attempt);
  return ceiling * (0.5 + Math.random() / 2);
}

export function liveUrl(): string {
  const { protocol, host } = window.location;
  return `${protocol === "https:" ? "wss" : "ws"}://${host}/ws/live`;
}
