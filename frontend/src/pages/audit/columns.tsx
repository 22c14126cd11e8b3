import { Anchor } from "@mantine/core";
import type { AuditEntry } from "@/api/types";
import type { Column } from "@/ui/DataTable";
import { Status } from "@/ui/Status";
import { Time } from "@/ui/Time";

type Fields = Record<string, unknown>;

/** What the entry changed, in a line: "tier: standard → premium". Times are left to the details. */
export function gist({ outcome, code, before, after }: AuditEntry): string {
  if (outcome === "refused") return code;
  const parts = Object.entries(after).flatMap(([thing, fields]) =>
    changes(thing, before[thing] as Fields | undefined, fields as Fields),
  );
  const gone = Object.keys(before).filter((thing) => !(thing in after));
  return [...parts, ...gone.map((thing) => `${thing} is gone`)].join(", ");
}

function changes(thing: string, old: Fields | undefined, fields: Fields): string[] {
  const changed = Object.entries(fields).filter(([name]) => !/_(at|until)$/.test(name));
  if (old) {
    return changed.map(([name, value]) => `${name}: ${short(old[name])} → ${short(value)}`);
  }
  if (changed.length > 1) return [`${thing} is new`];
  return changed.map(([name, value]) => `${name}: ${short(value)}`);
}

function short(value: unknown): string {
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  return text.length > 40 ? `${text.slice(0, 40)}…` : text || "–";
}

export function auditColumns(onOpen: (position: number) => void): Column<AuditEntry>[] {
  return [
    { title: "When", cell: (entry) => <Time at={entry.at} /> },
    {
      title: "Order",
      cell: ({ position, action }) => (
        <Anchor component="button" onClick={() => onOpen(position)}>
          {action}
        </Anchor>
      ),
    },
    { title: "Outcome", cell: (entry) => <Status value={entry.outcome} /> },
    { title: "Target", cell: (entry) => <span className="mono">{entry.target}</span> },
    { title: "Change", minor: true, cell: gist },
    { title: "Actor", cell: (entry) => <span className="mono">{entry.actor}</span> },
    { title: "From", minor: true, cell: (entry) => entry.address || "–" },
    { title: "Reason", minor: true, cell: (entry) => entry.reason || "–" },
  ];
}
