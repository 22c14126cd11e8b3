/** What each weight is called, and what a person may type for it. */
import type { WeightChanges } from "@/api/routing";
import type { RoutingWeights } from "@/api/types";

export type Scalar = Exclude<keyof RoutingWeights, "omega">;

export interface Meaning {
  name: Scalar;
  label: string;
  help: string;
  unit: string;
  step: number;
  max: number;
}

export const SCALARS: Meaning[] = [
  {
    name: "alpha",
    label: "α, latency",
    help: "Cost of an estimated second.",
    unit: "",
    step: 0.1,
    max: 1000,
  },
  {
    name: "beta",
    label: "β, utilisation",
    help: "Cost of a node that is fully used.",
    unit: "",
    step: 0.1,
    max: 1000,
  },
  {
    name: "gamma",
    label: "γ, loading",
    help: "Cost of a second of loading.",
    unit: "",
    step: 0.1,
    max: 1000,
  },
  {
    name: "prefix",
    label: "Cached prefix believed",
    help: "0 none of it, 1 all.",
    unit: "",
    step: 0.1,
    max: 1,
  },
  {
    name: "hop_s",
    label: "A level of distance",
    help: "Between zones of node and gateway.",
    unit: " s",
    step: 0.01,
    max: 10,
  },
  {
    name: "stale_s",
    label: "Silence that rules out",
    help: "From 2.5 to 60 s.",
    unit: " s",
    step: 0.5,
    max: 60,
  },
  {
    name: "t_safe",
    label: "Heat that costs more",
    help: "Hotter nodes are avoided.",
    unit: " °C",
    step: 1,
    max: 150,
  },
  {
    name: "t_max",
    label: "Heat that rules out",
    help: "Above the heat that costs more.",
    unit: " °C",
    step: 1,
    max: 150,
  },
];

export const OMEGAS = ["Idle", "Memory", "Cool", "Queue"];

export const LABELS: Record<keyof RoutingWeights, string> = {
  ...(Object.fromEntries(SCALARS.map(({ name, label }) => [name, label])) as Record<
    Scalar,
    string
  >),
  omega: "ω: idle, memory, cool, queue",
};

const UNITS = Object.fromEntries(SCALARS.map(({ name, unit }) => [name, unit]));

/** `shown("t_safe", 75) === "75 °C"`. */
export function shown(name: keyof RoutingWeights, value: number | number[]): string {
  return `${[value].flat().join(" · ")}${UNITS[name] ?? ""}`;
}

export function isSame(one: number | number[], other: number | number[]): boolean {
  return String(one) === String(other);
}

/** The weights of `wanted` that are not those of `now`. */
export function changesOf(wanted: RoutingWeights, now: RoutingWeights): WeightChanges {
  const names = Object.keys(LABELS) as (keyof RoutingWeights)[];
  return Object.fromEntries(
    names.filter((name) => !isSame(wanted[name], now[name])).map((name) => [name, wanted[name]]),
  );
}
