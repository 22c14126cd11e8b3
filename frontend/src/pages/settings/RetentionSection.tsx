import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { retentionQuery } from "@/api/retention";
import type { Retention } from "@/api/types";
import { Async } from "@/ui/Async";
import { Facts } from "@/ui/Facts";
import { integer, plural } from "@/ui/format";
import { Section } from "@/ui/Page";

const NAMES = { requests: "Requests", text: "Captured text" };

/** How long what is kept. */
export function RetentionSection() {
  const policies = useQuery(retentionQuery);
  return (
    <Section title="Retention">
      <Async query={policies}>
        {policies.data && (
          <Facts
            items={[
              ...policies.data.map((one): [string, string] => [NAMES[one.kind], kept(one)]),
              ["Events, totals of usage", "for ever"],
            ]}
          />
        )}
      </Async>
      <Text size="xs" c="dimmed" mt="xs">
        Requests leave for a verified archive, and every seal goes on to hold.
      </Text>
    </Section>
  );
}

function kept({ days, goes, removed_upto }: Retention): string {
  if (days === null) return "for ever";
  if (!goes) return `${plural(days, "day")}, but they stay: ENGINE_ARCHIVE names no place for them`;
  const gone = removed_upto > 0 ? `; up to number ${integer(removed_upto)} they are archived` : "";
  return `${plural(days, "day")}${gone}`;
}
