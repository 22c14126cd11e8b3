/** What can be asked to talk, grouped for a select: routes, models, aliases and exact versions. */
import { useQuery } from "@tanstack/react-query";
import { modelsQuery } from "@/api/models";
import { routesQuery } from "@/api/routes";
import type { Model, Version } from "@/api/types";

export interface TargetGroup {
  group: string;
  items: string[];
}

export function useTargets(): TargetGroup[] | undefined {
  const models = useQuery(modelsQuery).data;
  const routes = useQuery(routesQuery).data;
  if (!models || !routes) return undefined;
  const talking = models.filter((model) => model.versions.some(talks));
  const live = [...talking.filter(answers), ...talking.filter((model) => !answers(model))];
  const groups = [
    { group: "Models", items: live.map((model) => model.name) },
    { group: "Routes", items: routes.map((route) => route.name) },
    { group: "Aliases", items: live.flatMap((model) => model.aliases) },
    {
      group: "Exact versions",
      items: live.flatMap((model) =>
        model.versions.filter(talks).map((version) => version.version_id),
      ),
    },
  ];
  return withoutRepeats(groups);
}

function talks(version: Version): boolean {
  return !version.retired && version.task === "generate";
}

/** Such a model comes first, and is what a visitor who names none talks to. */
function answers({ versions }: Model): boolean {
  return versions.some((version) => talks(version) && version.ready_replicas > 0);
}

/** A select refuses the same value twice, and a route may shadow a model's name. */
function withoutRepeats(groups: TargetGroup[]): TargetGroup[] {
  const seen = new Set<string>();
  const first = (name: string) => !seen.has(name) && Boolean(seen.add(name));
  return groups
    .map(({ group, items }) => ({ group, items: items.filter(first) }))
    .filter(({ items }) => items.length > 0);
}
