"""The placer of a gateway: the next turn of a conversation goes where its beginning is cached."""

from msgspec.structs import replace

from controlplane.application.fleet import DeviceLoad, NodeLoad, ReplicaLoad
from controlplane.application.inference import InFlight, Job, Seen
from controlplane.domain import node as nodes
from controlplane.domain.model import ModelVersionScaled
from controlplane.domain.node import DeviceInfo
from controlplane.domain.routing import RoutingWeightsSet, Weights
from controlplane.entrypoints.openai.nodes import FleetPlacer
from gpuagent.engine.kv_cache import KVCache, extend_keys
from tests.application.test_fleet_state import Log
from tests.openai.test_serving import a_job

SALT = b"acme"
TURN = tuple(range(640))
NEXT = (*TURN, *range(5000, 5040))
IDLE = InFlight({}, {})


class Fleet:
    """Two idle replicas, the first of which is preferred if nothing tells them apart."""

    def __init__(self) -> None:
        self.log = Log()
        self.log.add("model-m", ModelVersionScaled("m", "v1", 2, 2, 1.0))
        device = DeviceInfo(0, "cpu", "device", 4096)
        self.log.add("node-n2", nodes.NodeJoined("n2", "b1", "z", (device,), 2.0))  # type: ignore[arg-type]
        self.log.plan()
        placed = self.log.state.placement.assignments.values()
        self.replicas = {one.node_id: one.replica_id for one in placed}
        for node_id, replica_id in self.replicas.items():
            self.log.add(f"node-{node_id}", nodes.ReplicaBecameReady(
                node_id, replica_id, "m@v1", 0, 1, 2, 3, 0.5, "", 1.0))  # type: ignore[arg-type]  # fmt: skip
        self.placer = FleetPlacer(self.log.state, self.log.loads, self.log.clock)
        self.seen: list[Seen] = []

    @property
    def preferred(self) -> str:
        return min(self.replicas, key=lambda name: self.replicas[name])

    @property
    def other(self) -> str:
        return max(self.replicas, key=lambda name: self.replicas[name])

    def hear(self, caches: dict[str, bytes], seq: int = 1, running: int = 0) -> None:
        """Both nodes report; ``running`` on the one that is not preferred."""
        for node_id, replica_id in self.replicas.items():
            num = running if node_id == self.other else 0
            figures = ReplicaLoad(replica_id, "m@v1", 0, "ready", num, num, 30, 999, 16, 2000.0,
                                  0.02, 5, 5, 0, 0, 0.0)  # fmt: skip
            found = {replica_id: caches[node_id]} if node_id in caches else {}
            device = DeviceLoad(0, 0.1, 1000, 4096, 0, 50.0, 0.0)
            said = (False, (device,), (figures,), found)
            load = NodeLoad(node_id, "b1", seq, 0.0, 1, 1, *said)
            self.placer.record(load, {})

    def chosen(self, prompt: tuple[int, ...], **changes: object) -> str:
        job: Job = a_job(prompts=(prompt,), cache_salt=SALT, **changes)
        return self.placer.choose(job, frozenset(), IDLE, self.seen.append).node_id


def filter_after(salt: bytes, tokens: tuple[int, ...]) -> bytes:
    """What an engine that has computed them reports."""
    kv, keys = KVCache(100, 16), []
    extend_keys(keys, salt, tokens, 16)
    assert kv.admit("a", keys, len(tokens))
    kv.register("a", keys, 0, len(tokens))
    return kv.prefix_filter()


def test_the_replica_that_has_the_prefix_is_chosen_while_loads_are_alike() -> None:
    fleet = Fleet()
    fleet.hear({})
    assert fleet.chosen(NEXT) == fleet.preferred
    fleet = Fleet()
    fleet.hear({fleet.other: filter_after(SALT, TURN)})
    assert fleet.chosen(NEXT) == fleet.other
    (seen,) = fleet.seen
    cached = {view.node_id: view.num_cached_tokens for view in seen.choice.views}
    assert cached == {fleet.preferred: 0, fleet.other: 640}
    assert seen.position == fleet.log.state.position


def test_a_busy_replica_loses_the_conversation_and_another_tenant_finds_nothing() -> None:
    fleet = Fleet()
    fleet.hear({fleet.other: filter_after(SALT, TURN)}, running=4)
    assert fleet.chosen(NEXT) == fleet.preferred
    fleet = Fleet()
    fleet.hear({fleet.other: filter_after(b"globex", TURN)})
    assert fleet.chosen(NEXT) == fleet.preferred


def test_what_a_node_has_evicted_counts_no_more_once_it_reports() -> None:
    fleet = Fleet()
    fleet.hear({fleet.other: filter_after(SALT, TURN)})
    fleet.hear({}, seq=2)
    assert fleet.chosen(NEXT) == fleet.preferred


def test_weights_reach_the_placer_with_their_event() -> None:
    fleet = Fleet()
    fleet.hear({fleet.other: filter_after(SALT, TURN)})
    blind = replace(Weights(), prefix=0.0)
    fleet.log.add("routing-weights", RoutingWeightsSet(Weights(), blind, 1.0))
    assert fleet.chosen(NEXT) == fleet.preferred
    assert fleet.seen[-1].choice.weights == blind


def test_the_next_turn_may_come_before_any_report() -> None:
    """What was sent a moment ago is known at once, and after two reports only from them."""
    fleet = Fleet()
    fleet.hear({fleet.other: filter_after(SALT, TURN[:32])})
    assert fleet.chosen(TURN) == fleet.other
    fleet.hear({}, seq=2)
    assert fleet.chosen(NEXT) == fleet.other
    fleet.log.clock.advance(5.0)
    fleet.hear({}, seq=3)
    assert fleet.chosen(NEXT) == fleet.preferred
