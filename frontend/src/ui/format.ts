/** Numbers and times as people read them; an absent value is a dash. */

const NONE = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const count = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function bytes(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NONE;
  let rest = value;
  let unit = 0;
  while (Math.abs(rest) >= 1024 && unit < UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${rest.toFixed(rest >= 100 || unit === 0 ? 0 : 1)} ${UNITS[unit]}`;
}

export function integer(value: number | null | undefined): string {
  return value == null ? NONE : count.format(value);
}

export function percent(ratio: number | null | undefined, digits = 0): string {
  return ratio == null || !Number.isFinite(ratio) ? NONE : `${(ratio * 100).toFixed(digits)} %`;
}

export function millis(value: number | null | undefined): string {
  if (value == null) return NONE;
  if (value < 10) return `${value.toFixed(1)} ms`;
  return value < 1_000 ? `${value.toFixed(0)} ms` : `${(value / 1_000).toFixed(2)} s`;
}

export function rate(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return NONE;
  return value.toFixed(value < 100 ? 1 : 0);
}

/** Unix seconds or an ISO string, as milliseconds; NaN if neither. */
export function toMillis(time: number | string | null | undefined): number {
  if (time == null || time === "") return Number.NaN;
  return typeof time === "number" ? time * 1_000 : Date.parse(time);
}

export function absolute(time: number | string | null | undefined): string {
  const at = toMillis(time);
  if (Number.isNaN(at)) return NONE;
  return new Date(at).toLocaleString("sv-SE", { timeZoneName: "short" });
}

export function clockTime(time: number | string): string {
  const at = new Date(toMillis(time));
  return Number.isNaN(at.getTime()) ? NONE : at.toLocaleTimeString("sv-SE");
}

const STEPS: [number, string][] = [
  [86_400, "d"],
  [3_600, "h"],
  [60, "min"],
];

export function ago(time: number | string | null | undefined, now: number): string {
  const at = toMillis(time);
  if (Number.isNaN(at)) return NONE;
  const seconds = Math.max(0, (now - at) / 1_000);
  if (seconds < 2) return "now";
  const step = STEPS.find(([size]) => seconds >= size);
  return step ? `${Math.floor(seconds / step[0])} ${step[1]} ago` : `${Math.floor(seconds)} s ago`;
}

/** "in 12 s", "now" once it is due. `at` in Unix seconds, `now` in milliseconds. */
export function inSeconds(at: number, now: number): string {
  const seconds = Math.ceil(at - now / 1_000);
  if (seconds <= 0) return "now";
  return seconds < 120 ? `in ${seconds} s` : `in ${Math.round(seconds / 60)} min`;
}

export function plural(num: number, noun: string, nouns = `${noun}s`): string {
  return `${integer(num)} ${num === 1 ? noun : nouns}`;
}

/** `node_lost` and `NodeDrainStarted` as words: "node lost", "Node drain started". */
export function words(code: string): string {
  const spaced = code.replaceAll(/[_-]/g, " ").replaceAll(/([a-z0-9])([A-Z])/g, "$1 $2");
  return spaced.charAt(0) + spaced.slice(1).toLowerCase();
}
