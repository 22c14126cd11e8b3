import { Alert, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { usageCheckQuery } from "@/api/usage";
import { Async } from "@/ui/Async";
import { integer, millis, plural } from "@/ui/format";
import { Section } from "@/ui/Page";
import { Status } from "@/ui/Status";
import { Time } from "@/ui/Time";

/** Says whether the totals are right, and when that was last looked at. */
export function CheckSection() {
  const check = useQuery(usageCheckQuery);
  const last = check.data?.last;
  return (
    <Section title="Check against the records">
      <Async query={check}>
        {last === null && (
          <Text size="sm">Not checked yet: the controller does it once it leads.</Text>
        )}
        {last && (
          <>
            <Status
              value={last.num_differences === 0 ? "ok" : "error"}
              label={
                last.num_differences === 0
                  ? "Every total equals the sum of its records"
                  : `${plural(last.num_differences, "figure")} differ from the records`
              }
            />
            <Text size="xs" c="dimmed">
              <Time at={last.at} />: {plural(last.num_totals, "total")} of{" "}
              {plural(last.num_records, "record")}, up to record {integer(last.position)}, in{" "}
              {millis(last.seconds * 1_000)}
            </Text>
            {last.differences.map((difference) => (
              <Alert key={difference} color="red" mt="xs">
                {difference}
              </Alert>
            ))}
          </>
        )}
      </Async>
    </Section>
  );
}
