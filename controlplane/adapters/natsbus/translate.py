"""Between the application's words and the wire's.

Whatever comes from a node is checked here before anybody believes it: its id must be the one in
the subject it came on (the server allows a node no other subject), figures must be finite and not
negative. A wall clock is not checked beyond being a number: no decision reads it.
"""

from math import isfinite

from controlplane.application.fleet import (
    DesiredNode,
    DesiredReplica,
    DeviceLoad,
    GroupPart,
    NodeLoad,
    NodeReport,
    ReplicaLoad,
    ReplicaReport,
)
from controlplane.domain.node import DeviceInfo, HostInfo
from controlplane.domain.version_spec import ENGINES
from gpuagent.wire import messages as wire
from gpuagent.wire.codec import decode

REPLICA_STATES = frozenset({"pending", "downloading", "loading", "ready", "stopping", "failed"})
TIERS = frozenset({"", "resident", "host", "storage"})
MAX_BYTES = 2**53
MAX_REASON = 2000  # characters


class Rejected(ValueError):
    """A well-formed message that says something impossible."""


# --- desired state ------------------------------------------------------------------------------
def desired_to_wire(node: DesiredNode, cluster_id: str) -> wire.DesiredState:
    return wire.DesiredState(
        cluster_id=cluster_id,
        epoch=node.epoch,
        generation=node.generation,
        node_id=node.node_id,
        drain=node.drain,
        replicas=tuple(_replica_to_wire(replica) for replica in node.replicas),
        tiers={one.replica_id: one.tier for one in node.replicas if one.tier},
    )


def _replica_to_wire(replica: DesiredReplica) -> wire.ReplicaSpec:
    spec = replica.spec
    return wire.ReplicaSpec(
        replica_id=replica.replica_id,
        version_id=replica.version_id,
        model=replica.model,
        version=spec.version,
        device_index=replica.device_index,
        memory_bytes=replica.memory_bytes,
        source=spec.source,
        sha256=spec.sha256,
        quantization=spec.quantization,
        kv_cache_dtype=spec.kv_cache_dtype,
        isolation=spec.colocation.isolation,
        priority=spec.priority,
        max_batch=spec.max_batch,
        max_model_len=spec.max_model_len,
        policy=spec.policy,
        tensor_parallel=spec.tensor_parallel,
        speculation=spec.speculation,
        draft_model=spec.draft_model if spec.speculation == "draft" else "",
        swap_bytes=spec.swap_bytes,
        disaggregation=spec.disaggregation,
        guaranteed_percent=spec.guaranteed_percent,
        engine=spec.engine,
        device_indices=replica.device_indices,
        task=spec.task,
        group=_part_to_wire(replica.group),
    )


def _part_to_wire(part: GroupPart | None) -> wire.GroupPart | None:
    if part is None:
        return None
    return wire.GroupPart(ranks=part.ranks, address=part.address, secret=part.secret)


# --- reports ------------------------------------------------------------------------------------
def node_report(payload: bytes, node_id: str) -> NodeReport:
    """An observed state; raises WireError or Rejected."""
    state = decode(payload, wire.ObservedState)
    _same_node(state.node_id, node_id)
    _natural(state.acked_epoch, state.acked_generation, state.cpu_milli, state.host_memory)
    return NodeReport(
        state.node_id,
        state.boot_id,
        state.acked_epoch,
        state.acked_generation,
        state.zone,
        tuple(_device(device) for device in state.devices),
        tuple(_replica_report(replica) for replica in state.replicas),
        _host(state),
        state.refusal[:MAX_REASON],
    )


def _host(state: wire.ObservedState) -> HostInfo:
    return HostInfo(
        state.cpu_milli,
        state.host_memory,
        state.fabric,
        _engines(state.engines),
        state.fabric_address,
    )


def _engines(said: tuple[str, ...]) -> tuple[str, ...]:
    """Those that this release knows, in its own order: a newer agent's others ask for nothing."""
    return tuple(one for one in ENGINES if one in said)


def _device(device: wire.Device) -> DeviceInfo:
    _natural(device.index, device.memory_bytes)
    return DeviceInfo(device.index, device.kind, device.name, device.memory_bytes, device.link)


def _replica_report(status: wire.ReplicaStatus) -> ReplicaReport:
    if status.state not in REPLICA_STATES:
        raise Rejected(f"replica state {status.state!r}")
    _natural(status.device_index, status.weights_bytes, status.kv_bytes, status.peak_bytes)
    _figures(status.load_seconds, status.retry_s, status.since)
    return ReplicaReport(
        status.replica_id,
        status.version_id,
        status.device_index,
        status.state,
        status.reason_code,
        status.reason[:MAX_REASON],
        status.weights_bytes,
        status.kv_bytes,
        status.peak_bytes,
        status.load_seconds,
        status.sha256,
        status.retry_s,
        status.since,
    )


# --- telemetry ----------------------------------------------------------------------------------
def node_load(payload: bytes, node_id: str) -> NodeLoad:
    """A telemetry message; raises WireError or Rejected."""
    said = decode(payload, wire.Telemetry)
    _same_node(said.node_id, node_id)
    _natural(said.seq, said.acked_epoch, said.acked_generation)
    _figures(said.at)
    return NodeLoad(
        said.node_id,
        said.boot_id,
        said.seq,
        said.at,
        said.acked_epoch,
        said.acked_generation,
        said.draining,
        tuple(_device_load(device) for device in said.devices),
        tuple(_replica_load(replica) for replica in said.replicas),
        {one.replica_id: one.prefix_filter for one in said.replicas if one.prefix_filter},
    )


def _device_load(load: wire.DeviceLoad) -> DeviceLoad:
    _natural(load.index, load.memory_used_bytes, load.memory_total_bytes, load.foreign_bytes)
    _natural(load.host_total_bytes)
    _figures(load.utilization, load.temperature_c, load.power_w)
    return DeviceLoad(
        load.index,
        min(load.utilization, 1.0),
        load.memory_used_bytes,
        load.memory_total_bytes,
        load.foreign_bytes,
        load.temperature_c,
        load.power_w,
        load.host_total_bytes,
    )


def _replica_load(load: wire.ReplicaLoad) -> ReplicaLoad:
    if load.state not in REPLICA_STATES:
        raise Rejected(f"replica state {load.state!r}")
    counts = (load.num_running, load.num_waiting, load.num_free_blocks, load.num_blocks)
    _natural(load.device_index, load.block_size, *counts, load.num_preemptions)
    _natural(load.generated_tokens, load.prompt_tokens, load.cached_tokens)
    engine = (load.num_steps, load.num_swapped_out, load.num_recomputed, load.swapped_bytes)
    guesses = (load.num_drafts, load.num_draft_tokens, load.num_accepted_tokens)
    _natural(*engine, *guesses, load.charged_bytes)
    _figures(load.expected_wait_s, load.load_work, load.tier_since)
    if load.tier not in TIERS:
        raise Rejected(f"tier {load.tier!r}")
    _figures(load.prefill_tokens_per_s, load.decode_step_s, load.last_step_age_s, load.step_s)
    return ReplicaLoad(
        load.replica_id,
        load.version_id,
        load.device_index,
        load.state,
        *counts,
        load.block_size,
        load.prefill_tokens_per_s,
        load.decode_step_s,
        load.generated_tokens,
        load.prompt_tokens,
        load.cached_tokens,
        load.num_preemptions,
        load.last_step_age_s,
        load.step_s,
        *engine,
        *guesses,
        load.tier,
        load.expected_wait_s,
        load.charged_bytes,
        load.load_work,
        load.tier_since,
    )


def _same_node(said: str, subject: str) -> None:
    if said != subject:
        raise Rejected(f"{subject} speaks as {said!r}")


def _natural(*values: int) -> None:
    for value in values:
        if not 0 <= value <= MAX_BYTES:
            raise Rejected(f"{value} is no count")


def _figures(*values: float) -> None:
    for value in values:
        if not isfinite(value) or not 0 <= value < 1e15:
            raise Rejected(f"{value} is no figure")
