"""Classes, interconnect, profiles and hosts: what a replica needs beside memory."""

from dataclasses import replace

from msgspec.structs import replace as changed

from controlplane.domain.placement import Shard
from controlplane.domain.version_spec import Needs
from controlplane.placement.plan import plan
from controlplane.placement.snapshot import DeviceView, NodeView, VersionView
from tests.placement.fleets import GB, after, assigned, fleet, node, version
from tests.placement.test_plan import codes, places


def needing(wanted: VersionView, **needs: object) -> VersionView:
    return replace(wanted, spec=changed(wanted.spec, needs=Needs(**needs)))  # type: ignore[arg-type]


def gpus(name: str, gigabytes: float, *links: str, kind: str = "NVIDIA H100 80GB HBM3",
         fabric: str = "") -> NodeView:  # fmt: skip
    devices = tuple(
        DeviceView(i, int(gigabytes * GB), kind="cuda", name=kind, link=link)
        for i, link in enumerate(links)
    )
    return NodeView(node(name).node_id, devices, fabric=fabric)


def test_a_class_is_asked_for_by_a_word_of_the_name_or_the_kind() -> None:
    nodes = [gpus("n1", 80, "", kind="NVIDIA A100"), gpus("n2", 80, "")]
    made = plan(fleet(nodes, [needing(version("a", 8), gpu_classes=("h200", "h100"))]), 2)
    assert places(made) == {"a.v1.g2.0": "n2/0"}
    assert [one.code for one in made.started[0].rejections] == ["wrong_class"]
    assert made.started[0].rejections[0].detail == (
        "needs h200 or h100, the device is 'NVIDIA A100'"
    )
    nowhere = plan(fleet(nodes, [needing(version("a", 8), gpu_classes=("b200",))]), 2)
    assert nowhere.unplaced[0].code == "wrong_class"


def test_a_group_stays_on_one_link() -> None:
    """Four devices free, two on each link: a pair fits on either, four do not fit at all."""
    nodes = [gpus("n1", 80, "a", "b", "b", "a")]
    made = plan(fleet(nodes, [version("m", 100, tensor_parallel=2)]), 2)
    assert made.started[0].assignment.shards == (
        Shard(nodes[0].node_id, 0),
        Shard(nodes[0].node_id, 3),
    )
    four = plan(fleet(nodes, [version("m", 100, tensor_parallel=4)]), 2)
    assert [one.code for one in four.unplaced] == ["too_few_devices"]


def test_the_devices_of_a_group_need_not_be_neighbours() -> None:
    """Devices 1 and 3 are full: a pair takes 0 and 2, the tightest that fit."""
    full = [assigned("x", "n1", index, 70, index) for index in (1, 3)]
    snapshot = fleet(
        [node("n1", *[80.0] * 4)], [version("x", 70, 2), version("m", 100, tensor_parallel=2)], full
    )
    made = plan(snapshot, 2)
    assert [one.device_index for one in made.started[0].assignment.shards] == [0, 2]
    assert made.started[0].reason.startswith("m@v1 goes to n1/0+2: the only group")
    assert plan(after(snapshot, made), 3).started == ()


def test_a_group_goes_over_nodes_only_when_no_node_has_room() -> None:
    """Equally many of each, the nodes with the fewest to give; never off the fabric."""
    free = {"n1": 3, "n2": 2, "n3": 1, "n4": 2}
    nodes = [gpus(name, 80, *["nv"] * number, fabric="ib") for name, number in free.items()]
    wanted = version("m", 160, tensor_parallel=4)
    made = plan(fleet([*nodes, gpus("n5", 80, "", "")], [wanted]), 2)
    shards = made.started[0].assignment.shards
    assert [(one.node_id, one.device_index) for one in shards] == [
        ("n2", 0), ("n2", 1), ("n4", 0), ("n4", 1),
    ]  # fmt: skip
    assert made.started[0].reason == (
        "m@v1 goes to n2/0+1, n4/0+1: no node has 4 devices free on one link; "
        "these are on 2 nodes joined by ib."
    )
    together = plan(fleet([*nodes, gpus("n6", 80, *["nv"] * 4, fabric="ib")], [wanted]), 2)
    assert {one.node_id for one in together.started[0].assignment.shards} == {"n6"}
    apart = [replace(one, fabric="") for one in nodes]
    assert plan(fleet(apart, [wanted]), 2).unplaced[0].num_missing == 1


def test_a_group_over_nodes_falls_with_either_node() -> None:
    nodes = [gpus("n1", 80, "nv", "nv", fabric="ib"), gpus("n2", 80, "nv", "nv", fabric="ib")]
    snapshot = fleet(nodes, [version("m", 160, tensor_parallel=4)])
    done = after(snapshot, plan(snapshot, 2))
    assert plan(done, 3).stopped == ()
    lost = replace(done, nodes=(nodes[0], replace(nodes[1], status="lost")))
    assert codes(plan(lost, 3)) == {"m.v1.g2.0": "node_lost"}


def test_a_group_evicts_what_it_must_of_one_link() -> None:
    """High takes the pair that hurts least: the two best-effort replicas, not the normal one."""
    placed = [
        assigned("b", "n1", 0, 50, 0),
        assigned("b", "n1", 1, 50, 1),
        assigned("c", "n2", 0, 50),
    ]
    versions = [version("a", 120, priority="high", tensor_parallel=2),
                version("b", 50, 2, priority="best-effort"), version("c", 50)]  # fmt: skip
    made = plan(fleet([node("n1", 80, 80), node("n2", 80, 80)], versions, placed), 2)
    assert codes(made) == {"b.v1.g1.0": "evicted", "b.v1.g1.1": "evicted"}
    assert {one.node_id for one in made.started[0].assignment.shards} == {"n1"}


def test_cores_and_memory_of_the_node_are_counted() -> None:
    small = replace(node("n1", 80), cpu_milli=8_000, host_memory=32 * GB)
    wanted = [needing(version(name, 8), cpu_milli=5_000, host_memory=8 * GB) for name in "ab"]
    made = plan(fleet([small], wanted), 2)
    assert len(made.started) == 1
    assert [(one.code, one.rejections[0].detail) for one in made.unplaced] == [
        ("insufficient_host", "needs 5 cores, 3 are free")
    ]
    assert len(plan(fleet([node("n1", 80)], wanted), 2).started) == 2


def test_complementary_profiles_meet() -> None:
    """A model that computes much goes beside the one that only fills memory."""
    heavy = needing(version("heavy", 10), compute_percent=80)
    busy = needing(version("busy", 40), compute_percent=80)
    large = needing(version("large", 40), compute_percent=10)
    there = [assigned("busy", "n1", 0, 40), assigned("large", "n2", 0, 40)]
    made = plan(fleet([node("n1", 80), node("n2", 80)], [heavy, busy, large], there), 2)
    assert places(made) == {"heavy.v1.g2.0": "n2/0"}


def test_memory_that_typical_models_can_use_is_kept_whole() -> None:
    """Models of 40 are typical: 20 goes where 30 are free, not where it would break the 40; best
    fit alone would say so too, but not of 25 that leave 15 of 40 or 5 of 30 (both useless)."""
    typical, small = version("big", 40, 3), version("small", 20)
    there = [assigned("x", "n1", 0, 50), assigned("x", "n2", 0, 40)]
    snapshot = fleet([node("n1", 80), node("n2", 80)], [version("x", 45, 2), typical, small], there)
    made = plan(snapshot, 2)
    assert places(made)["small.v1.g2.0"] == "n1/0"


def test_a_whole_node_is_kept_for_what_the_catalog_does_not_know() -> None:
    """By cores alone the idle node looks better; decisions of before are decided as they were."""
    idle = [
        replace(node(name, 80, 80), cpu_milli=16_000, host_memory=256 * GB) for name in ("n1", "n2")
    ]
    there = needing(version("x", 30), cpu_milli=8_000)
    pair = replace(needing(version("pair", 60, tensor_parallel=2), cpu_milli=6_000), num_replicas=0)
    small = needing(version("small", 20), cpu_milli=1_000)
    snapshot = fleet(idle, [there, pair, small], [assigned("x", "n1", 0, 30)])
    assert places(plan(snapshot, 2)) == {"small.v1.g2.0": "n1/0"}
    assert places(plan(replace(snapshot, keeps_wholes=False), 2)) == {"small.v1.g2.0": "n2/0"}
