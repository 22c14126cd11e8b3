/** A placement decision in sentences; the figures stay those of the planner. */
import type {
  Candidate,
  Decision,
  Rejection,
  ScoreTerm,
  Started,
  Stopped,
  Unplaced,
} from "@/api/types";
import { plural, words } from "@/ui/format";

export function device(node_id: string, index: number): string {
  return `${node_id}:${index}`;
}

export function summary({ started, stopped, unplaced }: Decision): string {
  const counts: [number, string][] = [
    [started.length, "started"],
    [stopped.length, "stopped"],
    [missing(unplaced), "without a place"],
  ];
  const parts = counts
    .filter(([num]) => num > 0)
    .map(([num, what]) => `${plural(num, "replica")} ${what}`);
  return parts.join(", ") || "nothing changed";
}

function missing(unplaced: Unplaced[]): number {
  return unplaced.reduce((sum, each) => sum + each.num_missing, 0);
}

export function startedSentence({ assignment, reason }: Started): string {
  const where = device(assignment.node_id, assignment.device_index);
  return `${assignment.version_id} starts on ${where}${because(reason)}`;
}

export function stoppedSentence({ assignment, code, reason }: Stopped): string {
  const where = device(assignment.node_id, assignment.device_index);
  return `${assignment.version_id} stops on ${where}${because(reason || words(code))}`;
}

export function unplacedSentence({ version_id, num_missing, code, reason }: Unplaced): string {
  return `${plural(num_missing, "replica")} of ${version_id} found no place${because(reason || words(code))}`;
}

export function rejectionSentence({ node_id, device_index, code, detail }: Rejection): string {
  const why = detail || words(code).toLowerCase();
  return `${device(node_id, device_index)} was ruled out: ${ended(why)}`;
}

function because(reason: string): string {
  return reason ? `: ${ended(reason)}` : ".";
}

function ended(text: string): string {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

export function byScore(candidates: Candidate[]): Candidate[] {
  return [...candidates].sort((a, b) => b.score - a.score);
}

/** Every score term that occurs, in order of first appearance. */
export function termNames(candidates: Candidate[]): string[] {
  return [...new Set(candidates.flatMap(({ terms }) => terms.map(({ name }) => name)))];
}

export function termValue(terms: ScoreTerm[], name: string): string {
  const term = terms.find((each) => each.name === name);
  return term ? term.value.toFixed(3) : "–";
}
