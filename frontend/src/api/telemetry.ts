/** The newest telemetry of each node, and a few minutes of it, outside react-query's caches. */
import { useSyncExternalStore } from "react";
import { useAsOf } from "./asOf";
import type { DeviceLoad, Telemetry } from "./liveMessages";

const HISTORY = 180; // at one report per 2 s: six minutes

export interface Sample {
  at: number;
  devices: DeviceLoad[];
  /** Null for the first report, which has none before it to compare with. */
  tokensPerSecond: number | null;
}

const latest = new Map<string, Telemetry>();
const history = new Map<string, Sample[]>();
const listeners = new Set<() => void>();
const NO_SAMPLES: Sample[] = [];

export function recordTelemetry(telemetry: Telemetry): void {
  const previous = latest.get(telemetry.node_id);
  latest.set(telemetry.node_id, telemetry);
  const sample = {
    at: telemetry.at,
    devices: telemetry.devices,
    tokensPerSecond: tokenRate(previous, telemetry),
  };
  const kept = history.get(telemetry.node_id) ?? NO_SAMPLES;
  history.set(telemetry.node_id, [...kept, sample].slice(-HISTORY));
  for (const listener of listeners) listener();
}

/** Tokens generated per second between two reports; counters that restart count from zero. */
export function tokenRate(previous: Telemetry | undefined, next: Telemetry): number | null {
  if (!previous || next.at <= previous.at) return null;
  const before = new Map(previous.replicas.map((r) => [r.replica_id, r.generated_tokens]));
  const grown = next.replicas.map((r) => {
    const known = before.get(r.replica_id) ?? r.generated_tokens;
    return Math.max(0, r.generated_tokens - known);
  });
  return grown.reduce((sum, tokens) => sum + tokens, 0) / (next.at - previous.at);
}

export function clearTelemetry(): void {
  latest.clear();
  history.clear();
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Telemetry is of now and kept nowhere: in the past there is none. */
export function useTelemetry(nodeId: string): Telemetry | undefined {
  const past = useAsOf() !== undefined;
  return useSyncExternalStore(subscribe, () => (past ? undefined : latest.get(nodeId)));
}

export function useTelemetryHistory(nodeId: string): Sample[] {
  const past = useAsOf() !== undefined;
  const read = () => (past ? NO_SAMPLES : (history.get(nodeId) ?? NO_SAMPLES));
  return useSyncExternalStore(subscribe, read);
}

/** A number computed over all nodes' newest reports; re-renders only when the number changes. */
export function useFleetFigure(figure: (all: Telemetry[]) => number): number {
  return useSyncExternalStore(subscribe, () => figure([...latest.values()]));
}

export function currentTokenRate(nodeId: string): number {
  return history.get(nodeId)?.at(-1)?.tokensPerSecond ?? 0;
}
