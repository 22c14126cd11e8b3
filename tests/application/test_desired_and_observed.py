"""Desired state is whole and never goes back; what nodes say is checked before it is believed."""

import asyncio

import pytest
from msgspec.structs import replace

from controlplane.adapters.clock import SystemClock
from controlplane.adapters.natsbus.publisher import DesiredPublisher
from controlplane.adapters.natsbus.subscriber import NodeSubscriber
from controlplane.adapters.natsbus.translate import (
    Rejected,
    desired_to_wire,
    node_load,
    node_report,
)
from controlplane.application import publish
from controlplane.application.fleet import (
    BusUnavailable,
    DesiredNode,
    DesiredReplica,
    DesiredTooLarge,
    FleetLoads,
    NodeLoad,
    NodeReport,
    StaleDesired,
)
from controlplane.application.fleet_state import FleetState
from controlplane.domain.ids import NodeId
from controlplane.domain.placement import Assignment, Shard
from controlplane.domain.version_spec import VersionSpec
from gpuagent.wire.codec import decode, encode
from gpuagent.wire.messages import (
    DesiredState,
    Device,
    DeviceLoad,
    ObservedState,
    ReplicaLoad,
    ReplicaStatus,
    Telemetry,
)
from tests.application.bus import control, node, until
from tests.natsserver import NatsServer, nats  # noqa: F401

SPEC = VersionSpec(version="v1", source="simulated://m", gpu_memory=1000, max_batch=7)
REPLICA = DesiredReplica("m.v1.g1.0", "m@v1", "m", 0, 1000, SPEC)


def desired(epoch: int, generation: int, *replicas: DesiredReplica) -> DesiredNode:
    return DesiredNode("n1", epoch, generation, False, replicas)


def test_a_group_is_divided_among_its_nodes_by_rank() -> None:
    """The node of the first rank first; of groups placed before there were shards, neighbours."""
    for shards, expected in (
        ((Shard(NodeId("n1"), 3), Shard(NodeId("n1"), 1)), {"n1": ((0, 3), (1, 1))}),
        ((Shard(NodeId("n1"), 3), Shard(NodeId("n2"), 1)), {"n1": ((0, 3),), "n2": ((1, 1),)}),
        ((), {"n1": ((0, 3), (1, 4))}),
    ):
        placed = Assignment("m.v1.g1.0", "m@v1", NodeId("n1"), 3, 1000, shards)
        assert publish.parts_of(placed, 2) == expected


async def test_a_node_reads_what_was_decided(nats: NatsServer) -> None:  # noqa: F811
    """The whole specification arrives at the node, joined from the version."""
    async with control(nats) as bus, node(nats, "n1") as n1:
        assert (await DesiredPublisher(bus, "c").deliver(desired(1, 4, REPLICA))).written
        entry = await (await n1.jetstream().key_value("desired")).get("n1")
        state = decode(entry.value, DesiredState)
        assert (state.cluster_id, state.epoch, state.generation) == ("c", 1, 4)
        assert state.replicas[0].source == "simulated://m"
        assert (state.replicas[0].max_batch, state.replicas[0].max_model_len) == (7, 4096)


def test_how_a_versions_engine_works_reaches_the_node() -> None:
    """A draft model only where somebody is to guess with it."""
    chosen = {
        "policy": "prefill-first",
        "quantization": "awq-int4",
        "kv_cache_dtype": "int8",
        "speculation": "draft",
        "draft_model": "file:///small",
        "swap_bytes": 77,
        "disaggregation": "prefill-decode",
        "guaranteed_percent": 40,
        "engine": "vllm",
    }
    sent = replace(SPEC, **chosen)
    (wire,) = desired_to_wire(desired(1, 1, replace(REPLICA, spec=sent)), "c").replicas
    assert {name: getattr(wire, name) for name in chosen} == chosen
    silent = replace(sent, speculation="none")
    (wire,) = desired_to_wire(desired(1, 1, replace(REPLICA, spec=silent)), "c").replicas
    assert (wire.speculation, wire.draft_model) == ("none", "")


def test_an_engines_figures_and_warnings_reach_the_control_plane() -> None:
    load = ReplicaLoad(
        replica_id="r", version_id="m@v1", device_index=0, state="ready", step_s=0.5, num_steps=1,
        num_swapped_out=2, num_recomputed=3, swapped_bytes=4, num_drafts=5, num_draft_tokens=6,
        num_accepted_tokens=7,
    )  # fmt: skip
    (read,) = node_load(encode(replace(_telemetry(), replicas=(load,))), "n1").replicas
    assert (read.step_s, read.num_steps, read.num_swapped_out, read.num_recomputed) == (
        0.5,
        1,
        2,
        3,
    )
    assert (read.swapped_bytes, read.num_drafts, read.num_draft_tokens) == (4, 5, 6)
    assert read.num_accepted_tokens == 7
    with pytest.raises(Rejected):
        negative = replace(load, swapped_bytes=-1)
        node_load(encode(replace(_telemetry(), replicas=(negative,))), "n1")
    status = ReplicaStatus(
        replica_id="r", version_id="m@v1", device_index=0, state="ready", reason_code="slow_bf16",
        reason="bf16 is slow here",
    )  # fmt: skip
    state = ObservedState(
        node_id="n1", boot_id="b", acked_epoch=1, acked_generation=1, replicas=(status,)
    )
    (report,) = node_report(encode(state), "n1").replicas
    assert (report.code, report.detail) == ("slow_bf16", "bf16 is slow here")


def test_the_engines_of_a_node_are_those_that_both_sides_know() -> None:
    """An older agent says nothing and has the built-in one; a newer one may have others."""
    state = ObservedState(node_id="n1", boot_id="b", acked_epoch=1, acked_generation=1)
    assert node_report(encode(state), "n1").host.engines == ("builtin",)
    newer = replace(state, engines=("vllm", "tomorrows", "builtin"))
    assert node_report(encode(newer), "n1").host.engines == ("builtin", "vllm")


async def test_an_older_state_never_replaces_a_newer_one(nats: NatsServer) -> None:  # noqa: F811
    """Epoch first, then generation; what was written stays."""
    async with control(nats) as bus:
        publisher = DesiredPublisher(bus, "c")
        await publisher.deliver(desired(2, 9, REPLICA))
        for epoch, generation in ((1, 99), (2, 8), (0, 0)):
            with pytest.raises(StaleDesired):
                await publisher.deliver(desired(epoch, generation))
        assert not (await publisher.deliver(desired(2, 10, REPLICA))).written


async def test_the_same_content_is_not_written_twice(nats: NatsServer) -> None:  # noqa: F811
    """The answer names the generation that stands, which is the one to be acknowledged."""
    async with control(nats) as bus:
        publisher = DesiredPublisher(bus, "c")
        await publisher.deliver(desired(1, 3, REPLICA))
        again = await publisher.deliver(desired(1, 7, REPLICA))
        assert (again.generation, again.written) == (3, False)
        assert (await publisher.deliver(desired(2, 7, REPLICA))).written, "a new epoch is told"
        assert (await publisher.deliver(desired(2, 8))).written


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xc1",
        encode(DesiredState(cluster_id="c", epoch=9, generation=9, node_id="n2")),
        encode(DesiredState(cluster_id="other", epoch=9, generation=9, node_id="n1")),
    ],
)
async def test_what_is_not_ours_is_overwritten(nats: NatsServer, nonsense: bytes) -> None:  # noqa: F811
    async with control(nats) as bus:
        await (await bus.jetstream().key_value("desired")).put("n1", nonsense)
        assert (await DesiredPublisher(bus, "c").deliver(desired(1, 1, REPLICA))).written


async def test_racing_controllers_leave_the_newest(nats: NatsServer) -> None:  # noqa: F811
    """Twenty writers with different generations at once: the highest stands."""
    async with control(nats) as bus:
        publisher = DesiredPublisher(bus, "c")
        replicas = [DesiredReplica(f"m.v1.g{g}.0", "m@v1", "m", 0, 1, SPEC) for g in range(20)]
        orders = [publisher.deliver(desired(1, g, replicas[g])) for g in reversed(range(20))]
        results = await asyncio.gather(*orders, return_exceptions=True)
        assert all(not isinstance(r, Exception) or isinstance(r, (StaleDesired, BusUnavailable))
                   for r in results)  # fmt: skip
        last = await publisher.deliver(desired(1, 19, replicas[19]))
        assert last.generation == 19


async def test_a_wiped_bus_is_filled_again(nats: NatsServer) -> None:  # noqa: F811
    """The bucket is made again and the state written, without anybody's help."""
    async with control(nats) as bus:
        publisher = DesiredPublisher(bus, "c")
        await publisher.deliver(desired(1, 3, REPLICA))
        nats.stop()
        nats.wipe()
        nats.start()
        await until(lambda: bus.connected and bus.num_reconnects, 5)
        assert (await publisher.deliver(desired(1, 3, REPLICA))).written


async def test_a_node_that_cannot_be_told_keeps_no_other_from_being_told(
    nats: NatsServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first node's state is larger than a message; the second gets its own, and once."""
    spec = replace(SPEC, source="file:///" + "a" * 1_100_000)
    nodes = [
        desired(1, 1, replace(REPLICA, spec=spec)),
        replace(desired(1, 1, REPLICA), node_id="n2"),
    ]
    monkeypatch.setattr(publish, "desired_nodes", lambda state, epoch, key: nodes)
    async with control(nats) as bus:
        states, clock = DesiredPublisher(bus, "c"), SystemClock()
        publisher = publish.Publisher(states, clock, FleetState(), FleetLoads(), 1)
        for _ in range(2):
            with pytest.raises(DesiredTooLarge, match="n1"):
                await publisher.step()
        assert publisher.num_written == 1
        assert not (await states.deliver(nodes[1])).written


async def test_without_a_server_delivery_is_refused(nats: NatsServer) -> None:  # noqa: F811
    async with control(nats) as bus:
        nats.stop(kill=True)
        await until(lambda: not bus.connected, 2)
        with pytest.raises(BusUnavailable):
            await DesiredPublisher(bus, "c").deliver(desired(1, 1))
        nats.start()


async def test_reports_are_read_at_start_and_heard_later(nats: NatsServer) -> None:  # noqa: F811
    """A report from before the subscription is found; a later one is pushed."""
    async with control(nats) as bus, node(nats, "n1") as n1:
        loads: list[NodeLoad] = []
        reports: list[NodeReport] = []
        store = await n1.jetstream().key_value("observed")
        device = Device(index=0, kind="cpu", name="cpu", memory_bytes=4096)
        state = ObservedState(
            node_id="n1", boot_id="b1", acked_epoch=1, acked_generation=2, devices=(device,)
        )
        await store.put("n1", encode(state))
        subscriber = NodeSubscriber(bus, loads.append, reports.append)
        await subscriber.start()
        assert reports[0].devices[0].memory_bytes == 4096
        later = ObservedState(node_id="n1", boot_id="b1", acked_epoch=1, acked_generation=3)
        await store.put("n1", encode(later))
        await until(lambda: len(reports) == 2)
        assert reports[1].acked_generation == 3
        await n1.client.publish("engine.telemetry.n1", encode(_telemetry()))
        await until(lambda: loads)
        assert loads[0].devices[0].utilization == 0.5


async def test_lies_are_dropped_and_counted(nats: NatsServer) -> None:  # noqa: F811
    async with control(nats) as bus, node(nats, "n1") as n1:
        loads: list[NodeLoad] = []
        subscriber = NodeSubscriber(bus, loads.append)
        await subscriber.start()
        for payload in (b"", b"\xc1", b'{"node_id": "n1"}', encode(_telemetry(node_id="n2"))):
            await n1.client.publish("engine.telemetry.n1", payload)
        await until(lambda: subscriber.rejected["n1"] == 4)
        assert loads == []


def _telemetry(node_id: str = "n1", **device: float) -> Telemetry:
    figures = {"utilization": 0.5, "memory_used_bytes": 1, "memory_total_bytes": 2} | device
    return Telemetry(
        node_id=node_id,
        boot_id="b1",
        seq=1,
        at=1.0,
        devices=(DeviceLoad(index=0, **figures),),  # type: ignore[arg-type]
        replicas=(ReplicaLoad(replica_id="r", version_id="m@v1", device_index=0, state="ready"),),
    )


@pytest.mark.parametrize(
    "device",
    [
        {"utilization": float("nan")},
        {"utilization": float("inf")},
        {"utilization": -0.1},
        {"memory_used_bytes": -1},
        {"memory_total_bytes": 2**60},
        {"temperature_c": 1e308},
        {"power_w": float("-inf")},
    ],
)
def test_impossible_figures_are_rejected(device: dict[str, float]) -> None:
    with pytest.raises(Rejected):
        node_load(encode(_telemetry(**device)), "n1")


def test_wall_clocks_are_not_judged() -> None:
    """A node whose clock is an hour off is as alive as any other."""
    assert node_load(encode(_telemetry()), "n1").at == 1.0
