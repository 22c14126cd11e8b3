import type { Model, Version } from "@/api/types";
import { plural } from "@/ui/format";

const RANK = ["stuck", "failed", "unplaced", "loading", "ready", "idle", "retired"];

export function liveVersions(model: Model): Version[] {
  return model.versions.filter((version) => !version.retired);
}

/** Its status; stuck, if it should be loading and something of it does not move. */
export function statusOf({ status, stuck_replicas }: Version): string {
  return status === "loading" && stuck_replicas > 0 ? "stuck" : status;
}

/** The live version most in need of attention, whose state is the model's; none without one. Of
 * those in the same state, one that has something to say of itself. */
export function worstVersion(model: Model): Version | undefined {
  const rank = (version: Version) => RANK.indexOf(statusOf(version));
  return liveVersions(model).toSorted(
    (one, other) => rank(one) - rank(other) || Number(!one.reason) - Number(!other.reason),
  )[0];
}

export function modelStatus(model: Model): string {
  const worst = worstVersion(model);
  if (worst) return statusOf(worst);
  return model.versions.length > 0 ? "retired" : "no version";
}

export function replicaCounts(versions: Version[]): { ready: number; desired: number } {
  const add = (field: "ready_replicas" | "desired_replicas") =>
    versions.reduce((sum, version) => sum + version[field], 0);
  return { ready: add("ready_replicas"), desired: add("desired_replicas") };
}

export function scaling(low: number, high: number): string {
  const most = plural(high, "replica");
  return low === high ? most : `${low} to ${most}`;
}
