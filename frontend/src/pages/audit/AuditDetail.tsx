import { Stack, Text } from "@mantine/core";
import { useCurrency } from "@/api/fleet";
import type { AuditEntry } from "@/api/types";
import { Facts } from "@/ui/Facts";
import { absolute } from "@/ui/format";
import { Id } from "@/ui/Id";
import { Json } from "@/ui/Json";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";

export function AuditDetail({ entry }: { entry: AuditEntry }) {
  const currency = useCurrency();
  const event = (
    <RouterAnchor key="event" to="/events" search={{ open: entry.position }} className="mono">
      {entry.position}
    </RouterAnchor>
  );
  return (
    <Stack gap="md">
      <Facts
        items={[
          ["Order", entry.action],
          ["Outcome", <Status key="outcome" value={entry.outcome} />],
          [
            "Target",
            <span key="target" className="mono">
              {entry.target}
            </span>,
          ],
          ["Actor", entry.actor],
          ["From", entry.address || "–"],
          ["Reason", entry.reason || "–"],
          ["When", absolute(entry.at)],
          ["Request", entry.correlation_id ? <Id key="id" value={entry.correlation_id} /> : "–"],
          ["Event", event],
        ]}
      />
      {tellsPrice(entry) && <Text size="sm">Prices are in {currency} per million tokens.</Text>}
      {entry.outcome === "refused" ? (
        <>
          <Text size="sm">
            {entry.code}: {entry.detail}
          </Text>
          <Json value={entry.asked} label="what was asked for" />
        </>
      ) : (
        <>
          <Text size="xs" c="dimmed">
            Before
          </Text>
          <Json value={entry.before} label="before" />
          <Text size="xs" c="dimmed">
            After
          </Text>
          <Json value={entry.after} label="after" />
        </>
      )}
    </Stack>
  );
}

function tellsPrice({ after, asked }: AuditEntry): boolean {
  return [asked, ...Object.values(after)].some((each) => hasPrice(each));
}

function hasPrice(fields: unknown): boolean {
  return typeof fields === "object" && fields !== null && "price" in fields;
}
