import { Drawer } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { useCurrency } from "@/api/fleet";
import { attemptsQuery, requestQuery } from "@/api/history";
import type { Attempt, RequestRecord } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Column, DataTable } from "@/ui/DataTable";
import { Facts } from "@/ui/Facts";
import { absolute, integer, millis, rate } from "@/ui/format";
import { Id } from "@/ui/Id";
import { StackBar } from "@/ui/Meter";
import { Section } from "@/ui/Page";
import { RouterAnchor } from "@/ui/RouterAnchor";
import { Status } from "@/ui/Status";
import { armOf, decodeRate } from "./columns";
import { DispatchSection } from "./Dispatch";

interface RequestDrawerProps {
  requestId: string | undefined;
  onClose: () => void;
}

export function RequestDrawer({ requestId, onClose }: RequestDrawerProps) {
  const request = useQuery({ ...requestQuery(requestId ?? ""), enabled: requestId !== undefined });
  return (
    <Drawer opened={requestId !== undefined} onClose={onClose} title="Request">
      <Async query={request}>{request.data && <RequestDetail request={request.data} />}</Async>
    </Drawer>
  );
}

function RequestDetail({ request }: { request: RequestRecord }) {
  const currency = useCurrency();
  return (
    <>
      <Facts items={[...identity(request), ...usage(request), ...price(request, currency)]} />
      <Waterfall request={request} />
      <Attempts requestId={request.request_id} />
      <DispatchSection requestId={request.request_id} />
    </>
  );
}

function identity(request: RequestRecord): [string, ReactNode][] {
  const node = request.node_id && (
    <RouterAnchor key="node" to="/fleet" search={{ node: request.node_id }}>
      {request.node_id}
    </RouterAnchor>
  );
  return [
    ["Request", <Id key="id" value={request.request_id} />],
    ["Outcome", <Status key="outcome" value={request.outcome} />],
    ["Error", request.error_code || "–"],
    ["Finish reason", request.finish_reason || "–"],
    ["Tenant", request.tenant_id],
    ["Subject", <Id key="subject" value={request.subject} />],
    ["User", request.end_user || "–"],
    ["Endpoint", request.endpoint],
    ["Asked for", request.requested_model],
    ["Route / arm", armOf(request)],
    ["Version", <Id key="version" value={request.version_id} />],
    ["Class", request.latency_class],
    ["Node", node || "–"],
    ["Replica", request.replica_id ? <Id key="replica" value={request.replica_id} /> : "–"],
    ["Attempts", integer(request.attempts)],
    ["Started", absolute(request.started_at)],
    ["Finished", absolute(request.finished_at)],
  ];
}

function usage(request: RequestRecord): [string, ReactNode][] {
  const cached = request.num_cached_tokens ?? 0;
  return [
    ["Prompt tokens", `${integer(request.num_prompt_tokens)} (${integer(cached)} from the cache)`],
    [
      "Output tokens",
      `${integer(request.num_output_tokens)} of at most ${integer(request.max_output_tokens)}`,
    ],
    ["TTFT", millis(request.ttft_ms)],
    ["Decode rate", `${rate(decodeRate(request))} tok/s`],
    ["Total", millis(request.duration_ms)],
  ];
}

function price(request: RequestRecord, currency: string): [string, ReactNode][] {
  const { price_input, price_cached_input, price_output } = request;
  return [
    ["Price", request.price === null ? "–" : `${request.price} ${currency}`],
    [
      "Per million tokens",
      `${price_input} prompt · ${price_cached_input} cached · ${price_output} output`,
    ],
  ];
}

function Attempts({ requestId }: { requestId: string }) {
  const attempts = useQuery(attemptsQuery(requestId));
  const rows = attempts.data?.results;
  if (rows?.length === 0) return null;
  return (
    <Section title="Attempts">
      <Async query={attempts}>
        <DataTable
          label="Attempts"
          columns={ATTEMPT_COLUMNS}
          rows={rows}
          rowKey={(row) => `${row.choice}.${row.attempt}`}
        />
      </Async>
    </Section>
  );
}

const ATTEMPT_COLUMNS: Column<Attempt>[] = [
  { title: "Choice", cell: (row) => row.choice },
  { title: "Attempt", cell: (row) => row.attempt },
  { title: "Outcome", cell: (row) => <Status value={row.outcome} /> },
  { title: "Why", cell: (row) => row.error_code || "–" },
  { title: "Node", cell: (row) => row.node_id },
  { title: "Output", right: true, cell: (row) => integer(row.num_output_tokens) },
  { title: "Took", right: true, cell: (row) => millis(row.duration_ms) },
];

/** Queue, prefill and decode on one time axis; what the record lacks is not drawn. */
function Waterfall({ request }: { request: RequestRecord }) {
  const { queue_ms, ttft_ms, duration_ms } = request;
  if (ttft_ms === null || duration_ms === null || duration_ms <= 0) return null;
  const queue = Math.min(queue_ms ?? 0, ttft_ms);
  const prefill = ttft_ms - queue;
  const decode = Math.max(0, duration_ms - ttft_ms);
  const parts = `Queue ${millis(queue)}, prefill ${millis(prefill)}, decode ${millis(decode)}`;
  return (
    <Section title="Where the time went">
      <StackBar
        label={parts}
        total={duration_ms}
        segments={[
          { key: "queue", label: "queue", value: queue, color: "var(--tone-warn)" },
          { key: "prefill", label: "prefill", value: prefill, color: "var(--tone-busy)" },
          { key: "decode", label: "decode", value: decode, color: "var(--accent)" },
        ]}
      />
      <p>{parts}</p>
    </Section>
  );
}
