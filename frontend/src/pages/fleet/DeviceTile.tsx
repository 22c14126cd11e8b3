import { useAsOf } from "@/api/asOf";
import type { DeviceLoad } from "@/api/liveMessages";
import type { Device, Replica } from "@/api/types";
import { bytes, percent, plural } from "@/ui/format";
import { hatched, Meter, type Segment, StackBar } from "@/ui/Meter";
import { Status } from "@/ui/Status";
import { Stuck } from "@/ui/Stuck";
import { Tier } from "@/ui/Tier";
import classes from "./Fleet.module.css";

interface DeviceTileProps {
  device: Device;
  replicas: Replica[];
  load: DeviceLoad | undefined;
  colors: Map<string, string>;
}

function segmentsOf({ replicas, load, colors }: DeviceTileProps): Segment[] {
  const placed = replicas.map((replica) => ({
    key: replica.replica_id,
    label: `${replica.version_id} ${bytes(replica.memory_bytes)}`,
    value: replica.memory_bytes,
    color: colors.get(replica.version_id),
    faded: replica.state !== "ready",
  }));
  const foreign = load?.foreign_bytes ?? 0;
  if (foreign === 0) return placed;
  const label = `other processes ${bytes(foreign)}`;
  return [...placed, { key: "foreign", label, value: foreign }];
}

/** One device: who holds its memory, how busy it is, how warm. */
export function DeviceTile(props: DeviceTileProps) {
  const { device, load } = props;
  const replicas = props.replicas.filter((replica) => replica.tier === "resident");
  const held = replicas.reduce((sum, replica) => sum + replica.memory_bytes, 0);
  const total = device.memory_bytes;
  return (
    <div className={classes.device}>
      <div className={classes.deviceHead}>
        <span title={device.name}>
          <span className="mono">
            {device.kind}:{device.index}
          </span>{" "}
          <span className={classes.soft}>{device.name}</span>
        </span>
        <span className={classes.soft}>
          {bytes(held)} / {bytes(total)}
        </span>
      </div>
      <StackBar
        label={`Memory: ${bytes(held)} of ${bytes(total)} held by ${plural(replicas.length, "replica")}`}
        total={total}
        segments={segmentsOf({ ...props, replicas })}
      />
      <Load load={load} />
      <ReplicaList {...props} />
    </div>
  );
}

function Load({ load }: { load: DeviceLoad | undefined }) {
  const past = useAsOf() !== undefined;
  if (past) return null;
  if (!load) return <div className={classes.load}>no telemetry yet</div>;
  const facts = [
    percent(load.utilization),
    load.temperature_c > 0 && `${load.temperature_c.toFixed(0)} °C`,
    load.power_w > 0 && `${load.power_w.toFixed(0)} W`,
  ].filter(Boolean);
  return (
    <div className={classes.load}>
      <Meter ratio={load.utilization} label="Utilisation" />
      <span>{facts.join(" · ")}</span>
    </div>
  );
}

/** It is the legend of the memory bar too: a row for each colour, and one for what is hatched. */
function ReplicaList({ replicas, colors, load }: DeviceTileProps) {
  const foreign = load?.foreign_bytes ?? 0;
  if (replicas.length === 0 && foreign === 0) return <span className={classes.soft}>empty</span>;
  return (
    <ul className={classes.replicas}>
      {replicas.map((replica) => (
        <li
          key={replica.replica_id}
          title={replica.waiting || replica.reason || replica.replica_id}
        >
          <span
            className={classes.swatch}
            style={{ background: colors.get(replica.version_id) }}
            aria-hidden
          />
          <span className={`mono ${classes.replicaName}`}>{replica.version_id}</span>
          <span className={classes.soft}>
            <Tier replica={replica} />
          </span>
          <Status value={replica.state} />
          <Stuck of={replica} />
        </li>
      ))}
      {foreign > 0 && (
        <li title="Memory of programs that are not this product's; models are placed around it.">
          <span className={`${classes.swatch} ${classes.hatchedSwatch} ${hatched}`} aria-hidden />
          <span className={classes.replicaName}>other processes</span>
          <span className={classes.soft}>{bytes(foreign)}</span>
        </li>
      )}
    </ul>
  );
}
