import { Button } from "@mantine/core";
import { useTelemetry } from "@/api/telemetry";
import type { Node } from "@/api/types";
import { plural } from "@/ui/format";
import { Status } from "@/ui/Status";
import { Stuck } from "@/ui/Stuck";
import { DeviceTile } from "./DeviceTile";
import { Draining } from "./Draining";
import classes from "./Fleet.module.css";

interface NodeCardProps {
  node: Node;
  colors: Map<string, string>;
  writable: boolean;
  onOpen: () => void;
  onDrain: () => void;
  onRemove: () => void;
}

export function NodeCard(props: NodeCardProps) {
  const { node, colors } = props;
  const telemetry = useTelemetry(node.node_id);
  const load = (index: number) => telemetry?.devices.find((device) => device.index === index);
  const on = (index: number) => node.replicas.filter((replica) => replica.device_index === index);
  return (
    <article className={nodeClass(node)} aria-label={`Node ${node.node_id}`}>
      <NodeHead {...props} />
      {node.stuck_since !== null && (
        <div className={classes.nodeStuck}>
          <Stuck of={node} label="has not accepted its plan" />
        </div>
      )}
      {node.draining && (
        <div className={classes.nodeStuck}>
          <Draining node={node} />
        </div>
      )}
      <div className={classes.devices}>
        {node.devices.map((device) => (
          <DeviceTile
            key={device.index}
            device={device}
            replicas={on(device.index)}
            load={load(device.index)}
            colors={colors}
          />
        ))}
      </div>
    </article>
  );
}

function nodeClass({ status, devices }: Node): string {
  const wide = devices.length > 2 && classes.wide;
  return [classes.node, wide, status === "lost" && classes.lost].filter(Boolean).join(" ");
}

function NodeHead({ node, writable, onOpen, onDrain, onRemove }: NodeCardProps) {
  return (
    <div className={classes.nodeHead}>
      <button type="button" className={`mono ${classes.nodeName}`} onClick={onOpen}>
        {node.node_id}
      </button>
      <Status value={node.status} />
      {node.draining && <Status value="draining" />}
      <span className={classes.soft}>
        {node.zone && `${node.zone} · `}
        {plural(node.devices.length, "device")} · {plural(node.replicas.length, "replica")}
      </span>
      <span className={classes.spacer} />
      {writable && node.status === "lost" && (
        <Button variant="default" size="compact-xs" onClick={onRemove}>
          Remove
        </Button>
      )}
      {writable && (
        <Button variant="default" size="compact-xs" onClick={onDrain}>
          {node.draining ? "Undrain" : "Drain"}
        </Button>
      )}
    </div>
  );
}
