import { useQuery } from "@tanstack/react-query";
import { preloadTotalsQuery, scalingsQuery } from "@/api/demand";
import type { PreloadTotal, Scaling } from "@/api/types";
import { type Column, DataTable } from "@/ui/DataTable";
import { integer, percent, words } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Section } from "@/ui/Page";
import { Time } from "@/ui/Time";

/** What the load has changed, and what loading ahead was worth; absent while neither was needed. */
export function DemandSections() {
  const scalings = useQuery(scalingsQuery).data?.results ?? [];
  const totals = useQuery(preloadTotalsQuery).data ?? [];
  return (
    <>
      {scalings.length > 0 && (
        <Section title="Scaled by load">
          <DataTable
            label="Scaled by load"
            columns={SCALINGS}
            rows={scalings}
            rowKey={({ position }) => String(position)}
          />
        </Section>
      )}
      {totals.length > 0 && (
        <Section title="Loaded ahead">
          <DataTable
            label="Loaded ahead"
            columns={TOTALS}
            rows={totals}
            rowKey={({ version_id }) => version_id}
          />
        </Section>
      )}
    </>
  );
}

function figures({ readings }: Scaling): string {
  return readings.map(({ name, value }) => `${name} ${Number(value.toPrecision(3))}`).join(", ");
}

/** Of the times when the model was asked for and either was there ahead or had to be woken. */
function hitRate({ num_hits, num_missed }: PreloadTotal): string {
  const asked = num_hits + num_missed;
  return asked === 0 ? "–" : percent(num_hits / asked);
}

const SCALINGS: Column<Scaling>[] = [
  { title: "Version", cell: ({ version_id }) => <Id value={version_id} /> },
  { title: "Replicas", right: true, cell: ({ before, after }) => `${before} → ${after}` },
  { title: "Why", cell: ({ code }) => words(code) },
  {
    title: "Reason",
    minor: true,
    cell: (scaling) => <span title={figures(scaling)}>{scaling.reason}</span>,
  },
  { title: "When", cell: ({ at }) => <Time at={at} /> },
];

const TOTALS: Column<PreloadTotal>[] = [
  { title: "Version", cell: ({ version_id }) => <Id value={version_id} /> },
  { title: "Hit rate", right: true, cell: hitRate },
  { title: "Hits", right: true, cell: ({ num_hits }) => integer(num_hits) },
  { title: "Woken instead", right: true, cell: ({ num_missed }) => integer(num_missed) },
  { title: "Wasted", right: true, cell: ({ num_wasted }) => integer(num_wasted) },
  {
    title: "Resident for nothing",
    right: true,
    minor: true,
    cell: ({ wasted_s }) => `${integer(Math.round(wasted_s))} s`,
  },
];
