import { shareOf } from "@/api/routes";
import type { Arm } from "@/api/types";
import { percent } from "@/ui/format";
import { StackBar } from "@/ui/Meter";

export function armColor(index: number): string {
  return `var(--cat-${index % 8})`;
}

/** How the weights split the traffic. */
export function ShareBar({ arms }: { arms: Arm[] }) {
  const shares = arms.map((arm) => `${arm.name || "unnamed"} ${percent(shareOf(arm, arms), 1)}`);
  return (
    <StackBar
      label={`Share of traffic: ${shares.join(", ")}`}
      total={1}
      segments={arms.map((arm, index) => ({
        key: `${index} ${arm.name}`,
        label: shares[index] ?? "",
        value: shareOf(arm, arms),
        color: armColor(index),
      }))}
    />
  );
}
