"""The plan of a node, against stated invariants and random fleets of replicas."""

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpuagent.agent.reconcile import HOLDING, Plan, Running, reconcile
from gpuagent.wire.messages import Device, ReplicaSpec
from tests.agent.harness import GIB, spec

DEVICES = tuple(
    Device(index=index, kind="cpu", name="cpu", memory_bytes=4 * GIB) for index in range(2)
)
BUCKETS = ("start", "wait", "refuse", "hold", "keep")
STATES = ("pending", "downloading", "loading", "ready", "stopping", "failed")


def ids(plan: Plan, bucket: str) -> list[str]:
    return [verdict.spec.replica_id for verdict in getattr(plan, bucket)]


def test_what_is_desired_and_absent_is_started() -> None:
    plan = reconcile([spec("a")], {}, DEVICES, now=0)
    assert (ids(plan, "start"), ids(plan, "stop")) == (["a"], [])


def test_what_runs_and_is_not_desired_is_stopped_and_its_memory_waited_for() -> None:
    """The example of the module's docstring."""
    a, b, c = (spec(name, memory_bytes=2 * GIB) for name in "abc")
    running = {"a": Running(a, "ready"), "c": Running(c, "ready")}
    plan = reconcile([a, b], running, DEVICES, now=0)
    assert (ids(plan, "stop"), ids(plan, "wait"), ids(plan, "keep")) == (["c"], ["b"], ["a"])
    assert plan.wait[0].reason == "memory held by c"
    stopping = {**running, "c": Running(c, "stopping")}
    assert ids(reconcile([a, b], stopping, DEVICES, now=0), "wait") == ["b"]
    assert ids(reconcile([a, b], {"a": running["a"]}, DEVICES, now=0), "start") == ["b"]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    plan = reconcile([spec("a", memory_bytes=5 * GIB)], {}, DEVICES, now=0)
    assert plan.refuse[0].code == "insufficient_memory"
    assert plan.refuse[0].reason == "needs 5.0 GiB, the device offers 4.0 GiB when empty"


def test_a_measured_peak_replaces_the_estimate_and_who_is_away_takes_nothing() -> None:
    a, b = spec("a", memory_bytes=3 * GIB), spec("b", memory_bytes=2 * GIB)
    assert ids(reconcile([a, b], {"a": Running(a, "ready")}, DEVICES, 0), "hold") == ["b"]
    small = {"a": Running(a, "ready", charged_bytes=2 * GIB)}
    assert ids(reconcile([a, b], small, DEVICES, 0), "start") == ["b"]
    away = {"a": Running(a, "ready", is_away=True)}
    plan = reconcile([a, b], away, DEVICES, 0)
    assert (ids(plan, "start"), ids(plan, "keep")) == (["b"], ["a"])


def group(name: str, **fields: object) -> ReplicaSpec:
    return spec(name, tensor_parallel=2, **fields)


def test_a_group_takes_its_share_of_every_device_or_of_none() -> None:
    """6 GiB are 3 on each device; where one device has only 1 left it is held, and what needs a
    device that the group is on waits for the group."""
    wide, small = group("wide", memory_bytes=6 * GIB), spec("small", memory_bytes=3 * GIB)
    assert ids(reconcile([wide], {}, DEVICES, 0), "start") == ["wide"]
    beside = spec("beside", memory_bytes=3 * GIB, device_index=1)
    plan = reconcile([wide, beside], {"beside": Running(beside, "ready")}, DEVICES, 0)
    assert (ids(plan, "hold"), plan.hold[0].code) == (["wide"], "not_resident")
    told = "needs 3.0 GiB, 1.0 GiB of the device are free; memory held by beside"
    assert plan.hold[0].reason == told
    for index in (0, 1):
        small = spec("small", memory_bytes=3 * GIB, device_index=index)
        plan = reconcile([small], {"wide": Running(wide, "ready")}, DEVICES, 0)
        assert (ids(plan, "stop"), plan.wait[0].reason) == (["wide"], "memory held by wide")
    measured = {"wide": Running(wide, "ready", charged_bytes=GIB)}
    assert ids(reconcile([wide, small], measured, DEVICES, 0), "start") == ["small"]
    too_large = group("wide", memory_bytes=9 * GIB)
    assert reconcile([too_large], {}, DEVICES, 0).refuse[0].code == "insufficient_memory"


def test_a_group_with_devices_elsewhere_or_absent_ones_is_refused() -> None:
    """Its devices are those named, else neighbours from the first on."""
    assert ids(reconcile([group("g", device_indices=(1, 0), device_index=1)], {}, DEVICES, 0),
               "start") == ["g"]  # fmt: skip
    for fields, code in (
        ({"device_index": 1}, "unknown_device"),
        ({"device_indices": (0,)}, "tensor_parallel_unsupported"),
        ({"device_indices": (0, 0)}, "tensor_parallel_unsupported"),
        ({"device_indices": (0, 7)}, "unknown_device"),
    ):
        assert reconcile([group("g", **fields)], {}, DEVICES, 0).refuse[0].code == code, fields


def test_foreign_memory_and_reservations_are_taken_off_what_a_device_offers() -> None:
    a = spec("a", memory_bytes=3 * GIB)
    assert reconcile([a], {}, DEVICES, 0, rooms={0: 2 * GIB}).refuse[0].code == (
        "insufficient_memory"
    )
    assert ids(reconcile([a], {}, DEVICES, 0, reserved={0: 2 * GIB}), "hold") == ["a"]


def test_an_unknown_device_is_refused() -> None:
    assert reconcile([spec("a", device_index=7)], {}, DEVICES, 0).refuse[0].code == "unknown_device"


def test_the_higher_priority_gets_the_memory() -> None:
    low = spec("low", memory_bytes=3 * GIB, priority="best-effort")
    high = spec("high", memory_bytes=3 * GIB, priority="high")
    plan = reconcile([low, high], {}, DEVICES, now=0)
    assert (ids(plan, "start"), ids(plan, "hold")) == (["high"], ["low"])
    assert plan.hold[0].code == "not_resident"


def test_a_failed_replica_is_started_again_only_when_it_is_due() -> None:
    running = {"a": Running(spec("a"), "failed", retry_at=10.0)}
    assert reconcile([spec("a")], running, DEVICES, now=9.9).wait[0].code == "backoff"
    assert ids(reconcile([spec("a")], running, DEVICES, now=10.0), "start") == ["a"]


def test_a_changed_specification_stops_the_old_one_first() -> None:
    running = {"a": Running(spec("a"), "ready")}
    plan = reconcile([spec("a", max_batch=2)], running, DEVICES, now=0)
    assert (ids(plan, "stop"), ids(plan, "wait"), ids(plan, "start")) == (["a"], ["a"], [])


specs = st.builds(
    spec,
    st.sampled_from("abcdefgh"),
    device_index=st.integers(0, 2),
    memory_bytes=st.integers(1, 5).map(lambda n: n * GIB),
    priority=st.sampled_from(["high", "normal", "best-effort"]),
)
unique_specs = st.lists(specs, unique_by=lambda s: s.replica_id, max_size=8)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[ReplicaSpec], dict[str, Running]]:
    """Desired replicas, and running ones that a correct agent could have."""
    wanted = draw(unique_specs)
    running: dict[str, Running] = {}
    free = {device.index: device.memory_bytes for device in DEVICES}
    for candidate in draw(unique_specs):
        state = draw(st.sampled_from(STATES))
        same = next((s for s in wanted if s.replica_id == candidate.replica_id), candidate)
        chosen = draw(st.sampled_from([same, candidate]))
        if state in HOLDING:
            if free.get(chosen.device_index, 0) < chosen.memory_bytes:
                continue
            free[chosen.device_index] -= chosen.memory_bytes
        retry_at = draw(st.sampled_from([0.0, 5.0, 50.0]))
        running[chosen.replica_id] = Running(chosen, state, retry_at)
    return wanted, running


@given(fleets())
def test_every_desired_replica_is_in_exactly_one_bucket_with_a_reason(
    fleet: tuple[list[ReplicaSpec], dict[str, Running]],
) -> None:
    wanted, running = fleet
    plan = reconcile(wanted, running, DEVICES, now=10)
    placed = [v for bucket in BUCKETS for v in getattr(plan, bucket)]
    assert sorted(v.spec.replica_id for v in placed) == sorted(s.replica_id for s in wanted)
    assert all(v.reason for v in (*placed, *plan.stop))
    assert all(v.code for v in (*plan.refuse, *plan.hold))


@given(fleets())
def test_starting_never_exceeds_a_device(
    fleet: tuple[list[ReplicaSpec], dict[str, Running]],
) -> None:
    """Counting all that holds memory now, stopping replicas included."""
    wanted, running = fleet
    plan = reconcile(wanted, running, DEVICES, now=10)
    for device in DEVICES:
        held = [
            r.spec.memory_bytes for r in running.values() if _on(r.spec, device, r.holds_memory)
        ]
        new = [v.spec.memory_bytes for v in plan.start if v.spec.device_index == device.index]
        assert sum(held) + sum(new) <= device.memory_bytes


def _on(spec: ReplicaSpec, device: Device, holds: bool) -> bool:
    return holds and spec.device_index == device.index


@given(fleets())
def test_the_undesired_is_stopped_and_the_desired_is_not(
    fleet: tuple[list[ReplicaSpec], dict[str, Running]],
) -> None:
    wanted, running = fleet
    plan = reconcile(wanted, running, DEVICES, now=10)
    exact = {s.replica_id: s for s in wanted}
    for replica_id, have in running.items():
        is_right = exact.get(replica_id) == have.spec
        is_stopped = replica_id in ids(plan, "stop")
        assert is_stopped == (not is_right and have.state != "stopping")


@given(fleets())
def test_obeying_the_plan_converges(
    fleet: tuple[list[ReplicaSpec], dict[str, Running]],
) -> None:
    """After stops end and starts succeed there is nothing left to start or stop."""
    wanted, running = fleet
    now = 10.0
    for _ in range(8):
        plan = reconcile(wanted, running, DEVICES, now)
        running = _obey(plan, running)
        now += 100
    last = reconcile(wanted, running, DEVICES, now)
    assert not (last.start or last.stop or last.wait)
    kept = {s.replica_id for s in wanted} - {*ids(last, "refuse"), *ids(last, "hold")}
    assert set(ids(last, "keep")) == kept
    assert reconcile(wanted, running, DEVICES, now) == last


def _obey(plan: Plan, running: dict[str, Running]) -> dict[str, Running]:
    after = {rid: r for rid, r in running.items() if r.state != "stopping"}
    for verdict in plan.stop:
        rid = verdict.spec.replica_id
        if running[rid].holds_memory:
            after[rid] = replace(running[rid], state="stopping")
        else:
            del after[rid]
    for verdict in plan.start:
        after[verdict.spec.replica_id] = Running(verdict.spec, "ready")
    return after


def test_the_same_input_gives_the_same_plan() -> None:
    wanted = [spec(name, memory_bytes=GIB) for name in "abcdefgh"]
    copies = [msgspec.structs.replace(s) for s in wanted]
    assert reconcile(wanted, {}, DEVICES, 0) == reconcile(copies, {}, DEVICES, 0)
