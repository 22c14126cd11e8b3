"""What the node says about itself: observed state, telemetry, metrics, health."""

import os
import time
from collections.abc import Mapping
from importlib.metadata import version

import msgspec

from gpuagent.agent import ipc, telemetry
from gpuagent.agent.http import Answer, json_answer
from gpuagent.agent.metrics import Served, Snapshot, render
from gpuagent.agent.node import Node
from gpuagent.agent.reconcile import devices_of
from gpuagent.agent.replicas import STARTING, Replica
from gpuagent.agent.residency import RESIDENT
from gpuagent.wire.messages import Device, DeviceLoad, ObservedState, ReplicaLoad, Telemetry


class Reports:
    """Builds every report from the node's current state; sends nothing."""

    def __init__(self, node: Node, bus_errors: Mapping[str, int]) -> None:
        self._node = node
        self._bus_errors = bus_errors
        self._seq = 0
        self._utilization: dict[int, float] = {}
        self._version = version("engine-controlplane")

    def observed(self) -> ObservedState:
        node = self._node
        return ObservedState(
            node_id=node.settings.node_id,
            boot_id=node.boot_id,
            acked_epoch=node.keeper.mark.epoch,
            acked_generation=node.keeper.mark.generation,
            devices=node.devices,
            replicas=() if node.is_stopping else node.table.statuses(),
            zone=node.settings.zone,
            version=self._version,
            at=time.time(),
            cpu_milli=1000 * (os.cpu_count() or 0) // node.settings.part().of,
            host_memory=node.settings.machine_bytes(),
            fabric=node.settings.fabric,
            engines=node.settings.engines(),
            refusal=node.keeper.refusal,
            fabric_address=node.fabric.address if node.fabric else "",
        )

    def telemetry(self) -> Telemetry:
        """The next telemetry message; ends the interval that its rates are about."""
        node = self._node
        self._seq += 1
        busy = node.meter.report()
        self._utilization = {device.index: 0.0 for device in node.devices}
        for replica in node.table:
            share = busy.get(replica.spec.replica_id, 0.0)
            for index in devices_of(replica.spec):
                self._utilization[index] = min(self._utilization.get(index, 0.0) + share, 1.0)
        desired = node.keeper.state
        return Telemetry(
            node_id=node.settings.node_id,
            boot_id=node.boot_id,
            seq=self._seq,
            at=time.time(),
            acked_epoch=node.keeper.mark.epoch,
            acked_generation=node.keeper.mark.generation,
            draining=node.is_stopping or (desired is not None and desired.drain),
            devices=self._devices(),
            replicas=self._replicas(),
        )

    def _replicas(self) -> tuple[ReplicaLoad, ...]:
        return tuple(self._replica(each) for each in self._node.table if each.spec.leads)

    def _replica(self, replica: Replica) -> ReplicaLoad:
        node, replica_id = self._node, replica.spec.replica_id
        served = node.inference.served.get(replica_id, Served())
        is_starting = replica.state in STARTING
        pids = node.host.pids(replica.spec.device_index) if is_starting else ()
        return node.meter.load_of(
            replica,
            served,
            node.inference.num_active_on(replica_id),
            node.tiers.num_held(replica_id),
            node.tiers.expected_wait(replica),
            telemetry.work_of(pids),
        )

    def _devices(self) -> tuple[DeviceLoad, ...]:
        return tuple(self._device(device) for device in self._node.devices)

    def _device(self, device: Device) -> DeviceLoad:
        node, residents = self._node, self._residents(device.index)
        load = telemetry.device_load(
            device,
            node.host.pids(device.index),
            round(self._utilization.get(device.index, 0.0), 4),
            sum(loaded.peak_bytes for loaded in residents),
            node.foreign[device.index],
            node.tiers.host_used_on(device.index),
        )
        taken = [node.meter.kv_held_bytes(loaded.replica_id) for loaded in residents]
        return msgspec.structs.replace(
            load,
            reserved_bytes=node.settings.reserved_bytes(device.kind),
            weights_bytes=sum(loaded.weights_bytes for loaded in residents),
            kv_pool_bytes=sum(loaded.kv_bytes for loaded in residents),
            kv_used_bytes=sum(taken),
            workspace_bytes=sum(loaded.workspace_bytes for loaded in residents),
            host_used_bytes=node.tiers.host_used_bytes,
            host_total_bytes=node.tiers.host_bytes,
        )

    def _residents(self, device_index: int) -> list[ipc.Loaded]:
        """What the loaded replicas on the device have said of themselves."""
        return [
            replica.loaded
            for replica in self._node.table
            if device_index in devices_of(replica.spec)
            and replica.loaded
            and replica.tier == RESIDENT
        ]

    # --- HTTP -------------------------------------------------------------------------------
    def metrics(self) -> Answer:
        return 200, "text/plain; version=0.0.4; charset=utf-8", render(self._snapshot)

    def _snapshot(self) -> Snapshot:
        node = self._node
        return Snapshot(
            node_id=node.settings.node_id,
            models={replica.spec.replica_id: replica.spec.model for replica in node.table},
            replicas=self._replicas(),
            devices=self._devices(),
            served=node.inference.served,
            finished=node.inference.finished,
            counts={
                **node.counts,
                **node.inference.counts,
                **self._bus_errors,
                "handed_over": node.host.num_handed_over,
                "fabric_refused": node.fabric.num_refused if node.fabric else 0,
            },
        )

    def livez(self) -> Answer:
        """The event loop answers; that is all liveness means here."""
        return json_answer(200, {"status": "ok", "boot_id": self._node.boot_id})

    def readyz(self) -> Answer:
        reason = self._node.admission_refusal()
        states = {r.spec.replica_id: r.state for r in self._node.table}
        body: dict[str, object] = {"ready": not reason, "reason": reason, "replicas": states}
        return json_answer(503 if reason else 200, body)
