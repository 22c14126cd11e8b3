import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { drainNode, nodesQuery, removeNode, undrainNode } from "@/api/fleet";
import { useMayWrite } from "@/api/session";
import type { Node } from "@/api/types";
import { Async } from "@/ui/Async";
import { type Confirmation, ConfirmModal } from "@/ui/ConfirmModal";
import { Empty } from "@/ui/Empty";
import { Page } from "@/ui/Page";
import { versionColors } from "./colors";
import classes from "./Fleet.module.css";
import { FleetSummary } from "./FleetSummary";
import { NodeCard } from "./NodeCard";
import { NodeDrawer } from "./NodeDrawer";

const route = getRouteApi("/app/fleet");

const JOIN =
  "python -m gpuagent --node-id n1 --nats-url nats://HOST:4222 --creds n1.creds --devices cpu:4GiB";

export function FleetPage() {
  const nodes = useQuery(nodesQuery);
  return (
    <Page title="Fleet" sub="What runs on which device, as the nodes report it.">
      <Async query={nodes}>
        {nodes.data?.length === 0 && (
          <Empty title="No node has joined" command={JOIN}>
            Write the node's credentials with{" "}
            <span className="mono">python manage.py node_credentials n1</span>, then start its
            agent. It appears here as soon as it reports.
          </Empty>
        )}
        {nodes.data && nodes.data.length > 0 && <FleetGrid nodes={nodes.data} />}
      </Async>
    </Page>
  );
}

function drainConfirmation({ node_id, draining }: Node): Confirmation {
  if (draining) {
    return {
      title: `Undrain ${node_id}`,
      text: "The node takes new replicas and new requests again.",
      label: "Undrain node",
      done: `${node_id} takes work again`,
      touches: ["nodes"],
      run: (reason) => undrainNode(node_id, reason),
    };
  }
  return {
    title: `Drain ${node_id}`,
    text: "Running requests finish here; its replicas are placed on other nodes and it gets no new work.",
    label: "Drain node",
    done: `${node_id} is draining`,
    touches: ["nodes"],
    run: (reason) => drainNode(node_id, reason),
  };
}

function removal({ node_id }: Node): Confirmation {
  return {
    title: `Remove ${node_id}`,
    text: "It leaves this list; its history stays. An agent that reports under its name joins anew.",
    label: "Remove node",
    done: `${node_id} is removed`,
    touches: ["nodes"],
    run: (reason) => removeNode(node_id, reason),
  };
}

function FleetGrid({ nodes }: { nodes: Node[] }) {
  const { node: open } = route.useSearch();
  const navigate = route.useNavigate();
  const [ask, setAsk] = useState<Confirmation | null>(null);
  const writable = useMayWrite("node");
  const colors = useMemo(
    () => versionColors(nodes.flatMap((node) => node.replicas.map((r) => r.version_id))),
    [nodes],
  );
  const show = (node: string | undefined) => navigate({ search: { node } });
  return (
    <>
      <FleetSummary nodes={nodes} />
      <div className={classes.nodes}>
        {nodes.map((node) => (
          <NodeCard
            key={node.node_id}
            node={node}
            colors={colors}
            writable={writable}
            onOpen={() => show(node.node_id)}
            onDrain={() => setAsk(drainConfirmation(node))}
            onRemove={() => setAsk(removal(node))}
          />
        ))}
      </div>
      <NodeDrawer
        node={nodes.find((node) => node.node_id === open)}
        onClose={() => show(undefined)}
      />
      <ConfirmModal ask={ask} onClose={() => setAsk(null)} />
    </>
  );
}
