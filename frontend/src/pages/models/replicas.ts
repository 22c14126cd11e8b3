import type { Model, Version } from "@/api/types";

const RANK = ["stuck", "failed", "unplaced", "loading", "ready", "idle", "retired"];

export function liveVersions(model: Model): Version[] {
  return model.versions.filter((version) => !version.retired);
}

/** Its status; stuck, if it should be loading and something of it does not move. */
export function statusOf({ status, stuck_replicas }: Version): string {
  return status === "loading" && stuck_replicas > 0 ? "stuck" : status;
}

/** The state most in need of attention among the model's live versions. */
export function worstStatus(model: Model): string {
  const states = liveVersions(model).map(statusOf);
  if (states.length === 0) return model.versions.length > 0 ? "retired" : "no version";
  return RANK.find((rank) => states.includes(rank)) ?? states[0] ?? "unknown";
}

export function replicaCounts(versions: Version[]): { ready: number; desired: number } {
  const add = (field: "ready_replicas" | "desired_replicas") =>
    versions.reduce((sum, version) => sum + version[field], 0);
  return { ready: add("ready_replicas"), desired: add("desired_replicas") };
}
