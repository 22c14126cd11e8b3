import type { ReactNode } from "react";
import { useAsOf } from "@/api/asOf";
import type { Telemetry } from "@/api/liveMessages";
import { currentTokenRate, useFleetFigure } from "@/api/telemetry";
import type { Node } from "@/api/types";
import { bytes, integer, percent, rate } from "@/ui/format";
import classes from "./Fleet.module.css";

const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);
const running = (all: Telemetry[]) =>
  sum(all.flatMap((node) => node.replicas.map((replica) => replica.num_running)));
const waiting = (all: Telemetry[]) =>
  sum(all.flatMap((node) => node.replicas.map((replica) => replica.num_waiting)));
const tokens = (all: Telemetry[]) => sum(all.map((node) => currentTokenRate(node.node_id)));

function meanUtilization(all: Telemetry[]): number {
  const loads = all.flatMap((node) => node.devices.map((device) => device.utilization));
  return loads.length > 0 ? sum(loads) / loads.length : 0;
}

/** The fleet in six figures; those with load in them move with the telemetry. */
export function FleetSummary({ nodes }: { nodes: Node[] }) {
  const past = useAsOf() !== undefined;
  const ready = nodes.filter((node) => node.status === "ready" && !node.draining).length;
  const replicas = nodes.flatMap((node) => node.replicas);
  const resident = replicas.filter((replica) => replica.tier !== "warm");
  const stuck = [...nodes, ...replicas].filter((one) => one.stuck_since !== null).length;
  const held = sum(resident.map((replica) => replica.memory_bytes));
  const memory = sum(nodes.flatMap((node) => node.devices.map((device) => device.memory_bytes)));
  return (
    <div className={classes.summary}>
      <Figure name="nodes taking work">
        {ready} / {nodes.length}
      </Figure>
      <Figure name="replicas ready">
        {replicas.filter((replica) => replica.state === "ready").length} / {replicas.length}
      </Figure>
      <Figure name="memory placed">
        {bytes(held)} / {bytes(memory)}
      </Figure>
      {stuck > 0 && <Figure name="stuck now">{integer(stuck)}</Figure>}
      {!past && <LiveFigures />}
    </div>
  );
}

function LiveFigures() {
  const utilization = useFleetFigure(meanUtilization);
  const numRunning = useFleetFigure(running);
  const numWaiting = useFleetFigure(waiting);
  const tokenRate = useFleetFigure(tokens);
  return (
    <>
      <Figure name="mean utilisation">{percent(utilization)}</Figure>
      <Figure name="requests running">{integer(numRunning)}</Figure>
      <Figure name="waiting">{integer(numWaiting)}</Figure>
      <Figure name="tokens per second">{rate(tokenRate)}</Figure>
    </>
  );
}

function Figure({ name, children }: { name: string; children: ReactNode }) {
  return (
    <div className={classes.figure}>
      <b>{children}</b>
      <span>{name}</span>
    </div>
  );
}
