import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { weightsQuery } from "@/api/routing";
import type { RoutingWeights } from "@/api/types";
import { Async } from "@/ui/Async";
import { Facts } from "@/ui/Facts";
import { Section } from "@/ui/Page";

const MEANINGS: [keyof RoutingWeights, string][] = [
  ["alpha", "α, per estimated second"],
  ["beta", "β, at full utilisation"],
  ["gamma", "γ, per second of loading"],
  ["prefix", "Cached prefix believed"],
  ["hop_s", "A level of distance"],
  ["omega", "ω: idle, memory, cool, queue"],
  ["t_safe", "Costs more from"],
  ["t_max", "Ruled out from"],
  ["stale_s", "Ruled out if not heard for"],
];
const UNITS: Partial<Record<keyof RoutingWeights, string>> = {
  t_safe: " °C",
  t_max: " °C",
  hop_s: " s",
  stale_s: " s",
};

/** By which weights gateways choose replicas, and where an operator has changed them. */
export function RoutingSection() {
  const routing = useQuery(weightsQuery);
  const found = routing.data;
  return (
    <Section title="Routing">
      <Async query={routing}>
        {found && (
          <Facts
            items={MEANINGS.map(([name, meaning]) => [
              meaning,
              told(name, found.weights, found.defaults),
            ])}
          />
        )}
      </Async>
      <Text size="xs" c="dimmed" mt="xs">
        A replica costs α · latency + β · utilisation + γ · loading. Changed by PATCH
        /api/v1/routing/weights/, on every gateway at once.
      </Text>
    </Section>
  );
}

function told(name: keyof RoutingWeights, now: RoutingWeights, usual: RoutingWeights): string {
  const [value, other] = [now, usual].map((one) => [one[name]].flat().join(" · "));
  const unit = UNITS[name] ?? "";
  return value === other ? `${value}${unit}` : `${value}${unit}, by default ${other}${unit}`;
}
