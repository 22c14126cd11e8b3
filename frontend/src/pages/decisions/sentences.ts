/** A placement decision in sentences; the figures stay those of the planner. */
import type {
  Candidate,
  Decision,
  Rejection,
  Retiered,
  ScoreTerm,
  Started,
  Stopped,
  Unplaced,
} from "@/api/types";
import { bytes, plural, words } from "@/ui/format";

export function device(node_id: string, index: number): string {
  return `${node_id}/${index}`;
}

export function summary({ started, stopped, unplaced, retiered }: Decision): string {
  const counts: [number, string[], string][] = [
    [started.length, started.map(versionOf), "started"],
    [stopped.length, stopped.map(versionOf), "stopped"],
    [retiered.length, retiered.map(versionOf), "in another tier"],
    [missing(unplaced), unplaced.map(({ version_id }) => version_id), "without a place"],
  ];
  const parts = counts
    .filter(([num]) => num > 0)
    .map(([num, versions, what]) => `${plural(num, "replica")}${ofThese(versions)} ${what}`);
  return parts.join(", ") || "nothing changed";
}

const NAMED = 2;

/** The versions by name while they fit in the line; the details name every one. */
function ofThese(versions: string[]): string {
  const names = [...new Set(versions)];
  return names.length <= NAMED ? ` of ${names.join(" and ")}` : "";
}

function versionOf({ assignment }: Started | Stopped | Retiered): string {
  return assignment.version_id;
}

function missing(unplaced: Unplaced[]): number {
  return unplaced.reduce((sum, each) => sum + each.num_missing, 0);
}

export function startedSentence({ assignment, reason }: Started): string {
  const { version_id, node_id, device_index } = assignment;
  return told(`${version_id} starts on ${device(node_id, device_index)}`, version_id, reason);
}

export function stoppedSentence({ assignment, code, reason }: Stopped): string {
  const { version_id, node_id, device_index } = assignment;
  const subject = `${version_id} stops on ${device(node_id, device_index)}`;
  return told(subject, version_id, reason || words(code).toLowerCase());
}

export function retieredSentence({ assignment, before, reason }: Retiered): string {
  const { version_id, tier } = assignment;
  const subject = `${version_id} is kept ${words(tier)}, no longer ${words(before)}`;
  return told(subject, version_id, reason);
}

export function unplacedSentence({ version_id, num_missing, code, reason }: Unplaced): string {
  const subject = `${plural(num_missing, "replica")} of ${version_id} found no place`;
  return told(subject, version_id, reason || words(code).toLowerCase());
}

export function rejectionSentence({ node_id, device_index, code, detail }: Rejection): string {
  const why = detail || words(code).toLowerCase();
  return `${device(node_id, device_index)} was ruled out: ${ended(why)}`;
}

/** The planner's reason; where it does not name the version itself, after what it is a reason for. */
function told(subject: string, version_id: string, reason: string): string {
  return reason.includes(version_id) ? ended(reason) : `${subject}: ${ended(reason)}`;
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

const BYTES = /_bytes$/;

export function termLabel(name: string): string {
  return words(name.replace(BYTES, ""));
}

export function termValue(terms: ScoreTerm[], name: string): string {
  const value = terms.find((each) => each.name === name)?.value;
  if (value === undefined) return "–";
  if (BYTES.test(name)) return bytes(value);
  return Number.isInteger(value) ? String(value) : value.toFixed(3);
}
