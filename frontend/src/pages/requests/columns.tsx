import { Anchor } from "@mantine/core";
import type { RequestRecord } from "@/api/types";
import type { Column } from "@/ui/DataTable";
import { integer, millis, rate, words } from "@/ui/format";
import { Status } from "@/ui/Status";
import { Time } from "@/ui/Time";

/** Output tokens per second after the first one. */
export function decodeRate({ num_output_tokens, duration_ms, ttft_ms }: RequestRecord) {
  if (num_output_tokens === null || duration_ms === null || ttft_ms === null) return null;
  const seconds = (duration_ms - ttft_ms) / 1_000;
  return num_output_tokens > 1 && seconds > 0 ? (num_output_tokens - 1) / seconds : null;
}

/** "route / arm" where a route chose, else nothing. */
export function armOf({ route, arm }: RequestRecord): string {
  return route ? `${route} / ${arm}` : "–";
}

function outcomeCell({ outcome, error_code }: RequestRecord) {
  const why = error_code && error_code !== outcome ? ` · ${words(error_code)}` : "";
  return <Status value={outcome} label={words(outcome) + why} />;
}

export function requestColumns(
  onOpen: (request_id: string) => void,
  currency: string,
): Column<RequestRecord>[] {
  return [
    { title: "When", cell: (request) => <Time at={request.started_at} /> },
    {
      title: "Request",
      cell: ({ request_id }) => (
        <Anchor component="button" className="mono" onClick={() => onOpen(request_id)}>
          {request_id.slice(0, 12)}
        </Anchor>
      ),
    },
    { title: "Outcome", cell: outcomeCell },
    { title: "Tenant", minor: true, cell: (request) => request.tenant_id },
    { title: "Version", cell: (request) => <span className="mono">{request.version_id}</span> },
    { title: "Route / arm", minor: true, cell: armOf },
    {
      title: "Node",
      minor: true,
      cell: ({ node_id }) => (node_id ? <span className="mono">{node_id}</span> : "–"),
    },
    { title: "Prompt", right: true, minor: true, cell: (r) => integer(r.num_prompt_tokens) },
    { title: "Output", right: true, cell: (request) => integer(request.num_output_tokens) },
    { title: `Price, ${currency}`, right: true, cell: (request) => request.price ?? "–" },
    { title: "TTFT", right: true, cell: (request) => millis(request.ttft_ms) },
    { title: "tok/s", right: true, minor: true, cell: (request) => rate(decodeRate(request)) },
    { title: "Total", right: true, minor: true, cell: (request) => millis(request.duration_ms) },
  ];
}
