"""A group over two nodes, from their reports to what each of them is told."""

from collections.abc import Iterable

import pytest

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.adapters.natsbus.translate import desired_to_wire, node_report
from controlplane.application.fleet import DesiredReplica, FleetLoads
from controlplane.application.fleet_state import FleetState
from controlplane.application.handle import CommandHandler
from controlplane.application.ports import Append, EventMeta
from controlplane.application.project import LogFollower
from controlplane.application.publish import desired_nodes
from controlplane.application.reconcile import Reconciler, inputs_of, node_views
from controlplane.domain import node as nodes
from controlplane.domain.ids import NodeId
from controlplane.domain.model import ModelRegistered, ModelVersionAdded
from controlplane.domain.node import DeviceInfo, HostInfo
from controlplane.domain.placement import PlanInputs
from controlplane.domain.version_spec import VersionSpec
from gpuagent.wire.codec import encode
from gpuagent.wire.messages import ObservedState

GIB = 2**30
WIDE = VersionSpec(version="v1", source="simulated://m", gpu_memory=4 * GIB, tensor_parallel=2)


class Fleet:
    """Nodes of one device each on one fabric; the version wants two devices."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.clock = ManualClock()
        self.store = MemoryEventStore(self.clock)
        self.state, self.loads = FleetState(), FleetLoads()
        self.follower = LogFollower(self.store, 0, self.state.apply)
        handler = CommandHandler(self.store, self.clock)
        self.reconciler = Reconciler(handler, self.clock, self.state, self.loads)
        for number, address in enumerate(addresses, 1):
            self.join(f"n{number}", address)
        self.add("model-m", ModelRegistered("m", 0.0), ModelVersionAdded("m", WIDE, 0.0))

    def add(self, stream: str, *events: object) -> None:
        self.store.append(Append(stream, None, events, EventMeta("user:ann")))  # type: ignore[arg-type]
        self.follower.catch_up()

    def join(self, name: str, address: str, boot: str = "b1") -> None:
        host = HostInfo(fabric="ib", fabric_address=address)
        device = DeviceInfo(0, "cpu", "cpu", 3 * GIB)
        self.add(f"node-{name}", nodes.NodeJoined(NodeId(name), boot, "z", (device,), 0.0, host))

    def plan(self) -> None:
        self.reconciler.step()
        self.follower.catch_up()

    def told(self, key: bytes = b"k") -> dict[str, tuple[DesiredReplica, ...]]:
        return {one.node_id: one.replicas for one in desired_nodes(self.state, 1, key)}


def test_each_node_is_told_its_ranks_and_where_the_first_one_is() -> None:
    fleet = Fleet(["10.0.0.1:7", "10.0.0.2:8"])
    fleet.plan()
    told = fleet.told()
    (first,), (second,) = told["n1"], told["n2"]
    assert first.group and second.group
    assert (first.group.ranks, second.group.ranks) == ((0,), (1,))
    assert (first.group.address, second.group.address) == ("", "10.0.0.1:7")
    assert first.group.secret == second.group.secret and len(first.group.secret) == 32
    assert first.replica_id == second.replica_id and first.memory_bytes == 4 * GIB
    (wire,) = desired_to_wire(desired_nodes(fleet.state, 1, b"k")[1], "c").replicas
    assert wire.group and (wire.group.ranks, wire.device_indices, wire.leads) == ((1,), (0,), False)


def test_without_a_key_no_group_is_told_of() -> None:
    fleet = Fleet(["10.0.0.1:7", "10.0.0.2:8"])
    fleet.plan()
    with pytest.raises(ValueError, match="needs a key"):
        fleet.told(b"")


def test_a_secret_is_of_one_placement_and_one_control_plane() -> None:
    fleet = Fleet(["10.0.0.1:7", "10.0.0.2:8"])
    fleet.plan()

    def secret(key: bytes = b"k") -> bytes:
        (one,) = fleet.told(key)["n1"]
        assert one.group
        return one.group.secret

    before = secret()
    assert secret() == before != secret(b"another")
    fleet.add("node-n2", nodes.NodeLost(NodeId("n2"), 15.0, 1.0))
    fleet.plan()
    assert fleet.told() == {"n1": (), "n2": ()}, "a group with a lost node is lost"
    fleet.join("n2", "10.0.0.2:9", "b2")
    fleet.plan()
    assert secret() != before


def test_the_first_nodes_new_address_is_told_to_the_others_alone() -> None:
    """Told itself, it would begin anew for nothing."""
    fleet = Fleet(["10.0.0.1:7", "10.0.0.2:8"])
    fleet.plan()
    before = fleet.told()
    fleet.join("n1", "10.0.0.1:9", "b2")
    after = fleet.told()
    assert after["n1"] == before["n1"]
    (second,) = after["n2"]
    assert second.group and second.group.address == "10.0.0.1:9"


@pytest.mark.parametrize("addresses", [["", "10.0.0.2:8"], ["10.0.0.1:7", ""]])
def test_nothing_is_placed_over_nodes_whose_agents_take_no_part(addresses: list[str]) -> None:
    fleet = Fleet(addresses)
    fleet.plan()
    assert fleet.told() == {"n1": (), "n2": ()}
    assert fleet.state.placement.unplaced[0].num_missing == 1


def test_earlier_planners_asked_for_the_fabric_alone() -> None:
    """Their decisions are decided again as they were."""
    fleet = Fleet(["", "10.0.0.2:8"])
    now = inputs_of(fleet.state, fleet.loads, 0.0)
    assert [one.fabric for one in node_views(fleet.state, now)] == ["", "ib"]
    then = PlanInputs(planner=6)
    assert [one.fabric for one in node_views(fleet.state, then)] == ["ib", "ib"]


def test_an_agents_address_is_in_its_report() -> None:
    said = ObservedState(
        node_id="n1", boot_id="b", acked_epoch=1, acked_generation=1, fabric="ib",
        fabric_address="10.0.0.1:7",
    )  # fmt: skip
    assert node_report(encode(said), "n1").host.fabric_address == "10.0.0.1:7"
