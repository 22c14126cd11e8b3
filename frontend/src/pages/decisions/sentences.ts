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
  const counts: [Counts, string][] = [
    [byVersion(started.map(versionOf)), "started"],
    [byVersion(stopped.map(versionOf)), "stopped"],
    [byVersion(retiered.map(versionOf)), "in another tier"],
    [new Map(unplaced.map(({ version_id, num_missing }) => [version_id, num_missing])), WITHOUT],
  ];
  const parts = counts
    .filter(([counted]) => counted.size > 0)
    .map(([counted, what]) => `${replicas(counted)} ${what}`);
  return parts.join(", ") || "nothing changed";
}

/** Replicas by version. */
type Counts = Map<string, number>;

const WITHOUT = "without a place";
const NAMED = 2;

function byVersion(versions: string[]): Counts {
  const counted: Counts = new Map();
  for (const each of versions) counted.set(each, (counted.get(each) ?? 0) + 1);
  return counted;
}

/** How many of which version while the names fit in the line; the details name every one. */
function replicas(counted: Counts): string {
  if (counted.size <= NAMED) {
    const each = [...counted].map(([version, num]) => `${plural(num, "replica")} of ${version}`);
    return each.join(" and ");
  }
  return plural(
    [...counted.values()].reduce((sum, num) => sum + num, 0),
    "replica",
  );
}

function versionOf({ assignment }: Started | Stopped | Retiered): string {
  return assignment.version_id;
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
  const why = (detail || words(code).toLowerCase()).replace(`node ${node_id} is`, "its node is");
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
