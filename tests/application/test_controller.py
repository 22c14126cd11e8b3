"""The controller against a real bus and scripted nodes: from the log to a node at work."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import BucketNotFoundError

from controlplane.adapters.clock import SystemClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.adapters.natsbus.connection import Bus
from controlplane.application.fleet import BusUnavailable
from controlplane.application.handle import CommandHandler
from controlplane.application.ingest import Timings
from controlplane.application.overdue import Deadlines
from controlplane.application.ports import CONTROLLER_LEASE, EventMeta, EventStore
from controlplane.application.project import LogFollower
from controlplane.application.tasks import end_tasks
from controlplane.domain import model, node
from controlplane.domain.ids import NodeId
from controlplane.domain.model import AddVersion, RegisterModel, RetireVersion
from controlplane.domain.node import DrainNode, RemoveNode
from controlplane.domain.placement import PlacementDecided
from controlplane.domain.version_spec import VersionSpec
from controlplane.entrypoints.processes.controller import (
    Controller,
    ControllerSettings,
)
from controlplane.entrypoints.processes.controller_metrics import ControllerMetrics
from controlplane.entrypoints.processes.controller_server import probes_of
from controlplane.entrypoints.processes.sealing import Sealing
from gpuagent.wire.codec import decode, encode
from gpuagent.wire.messages import (
    DesiredState,
    Device,
    DeviceLoad,
    ObservedState,
    ReplicaStatus,
    Telemetry,
)
from tests.application import bus as ends
from tests.application.bus import until
from tests.natsserver import NatsServer, nats  # noqa: F401

META = EventMeta("user:ann")
FAST = Timings(suspect_s=0.6, lost_s=1.2)
GIB = 1024**3


class NoReadModel:
    """Stands for the projector: the rows are not what these tests look at."""

    def __init__(self, store: EventStore) -> None:
        self._follower = LogFollower(store, 0, lambda recorded: None)

    def catch_up(self, limit: int = 1000) -> int:
        return self._follower.catch_up()


class Plane:
    """A log in memory, and controllers over it."""

    def __init__(self, server: NatsServer) -> None:
        self.server, self.clock = server, SystemClock()
        self.store: EventStore = MemoryEventStore(self.clock)
        self.handler = CommandHandler(self.store, self.clock)

    def controller(self, sealing: Sealing | None = None, **changes: object) -> Controller:
        settings = ControllerSettings(
            self.server.url, self.server.control_creds, "test", FAST, lease_s=2.0, round_s=0.2,
            verify_s=0.5,
        )  # fmt: skip
        return Controller(
            replace(settings, **changes),  # type: ignore[arg-type]
            self.store,
            CommandHandler(self.store, self.clock),
            self.clock,
            NoReadModel(self.store),
            sealing=sealing,
        )

    @asynccontextmanager
    async def running(self, **changes: Any) -> AsyncIterator[Controller]:
        controller, stop = self.controller(**changes), asyncio.Event()
        task = asyncio.create_task(controller.run(stop))
        try:
            yield controller
        finally:
            stop.set()
            await asyncio.wait_for(task, 8)

    def add_model(self, name: str = "m", **fields: object) -> None:
        spec = VersionSpec(
            version="v1",
            source=f"simulated://{name}",
            gpu_memory=GIB,
            **fields,  # type: ignore[arg-type]
        )
        now = self.clock.now()
        stream = f"model-{name}"
        self.handler.handle(model.DECIDER, stream, RegisterModel(name, now), META)
        self.handler.handle(model.DECIDER, stream, AddVersion(name, spec, now), META)

    def names(self, node_id: str | None = None) -> list[str]:
        """Event types in the log, of one node's stream or of all."""
        events = self.store.read_all(0, 10_000)
        return [one.type for one in events if node_id in (None, one.stream.partition("-")[2])]

    def decisions(self) -> list[PlacementDecided]:
        return [one.event for one in self.store.read_stream("placement")]  # type: ignore[misc]


class ScriptedNode:
    """An agent's half of the protocol, spoken by hand; runs whatever it is told, instantly."""

    def __init__(self, bus: Bus, node_id: str, boot: str = "b1") -> None:
        self.bus, self.node_id, self.boot = bus, node_id, boot
        self.desired = DesiredState(cluster_id="", epoch=0, generation=0, node_id=node_id)
        self.history: list[tuple[int, int]] = []
        self.state = "ready"
        self.seq = 0
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        async def hint(message: Msg) -> None:
            await self._obey(decode(message.data, DesiredState))

        await self.bus.client.subscribe(f"$KV.desired.{self.node_id}", cb=hint)
        await self.report()
        self.revive()

    async def look(self) -> None:
        """What an agent does when it is connected again: a hint may have come before it was."""
        try:
            desired = await self.bus.jetstream().key_value("desired")
            await self._obey(decode((await desired.get(self.node_id)).value, DesiredState))
        except (BusUnavailable, NatsError, TimeoutError):
            await asyncio.sleep(0.1)

    async def _obey(self, offered: DesiredState) -> None:
        number = (offered.epoch, offered.generation)
        assert number >= (self.desired.epoch, self.desired.generation), "an older state came"
        self.history.append(number)
        self.desired = offered
        await self.report()

    async def report(self) -> None:
        state = ObservedState(
            node_id=self.node_id,
            boot_id=self.boot,
            acked_epoch=self.desired.epoch,
            acked_generation=self.desired.generation,
            devices=(Device(index=0, kind="cpu", name="cpu", memory_bytes=4 * GIB),),
            replicas=tuple(
                ReplicaStatus(
                    replica_id=one.replica_id,
                    version_id=one.version_id,
                    device_index=one.device_index,
                    state=self.state,
                    reason_code="oom" if self.state == "failed" else "",
                )
                for one in self.desired.replicas
            ),
        )
        async with asyncio.timeout(10):  # the controller makes the bucket
            while True:
                try:
                    observed = await self.bus.jetstream().key_value("observed")
                    break
                except BucketNotFoundError:
                    await asyncio.sleep(0.05)
        await observed.put(self.node_id, encode(state))

    def silence(self) -> None:
        """Stop the heartbeats, as a dead or cut-off node does."""
        if self._beating is not None:
            self._beating.cancel()

    def revive(self) -> None:
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.seq += 1
            message = Telemetry(
                node_id=self.node_id,
                boot_id=self.boot,
                seq=self.seq,
                at=time.time(),
                acked_epoch=self.desired.epoch,
                acked_generation=self.desired.generation,
                devices=(
                    DeviceLoad(
                        index=0, utilization=0.25, memory_used_bytes=GIB, memory_total_bytes=4 * GIB
                    ),
                ),
            )
            if self.bus.connected:
                await self.bus.client.publish(f"engine.telemetry.{self.node_id}", encode(message))
            await asyncio.sleep(0.1)

    def runs(self) -> list[str]:
        return [one.replica_id for one in self.desired.replicas]


@asynccontextmanager
async def agent(server: NatsServer, node_id: str) -> AsyncIterator[ScriptedNode]:
    async with ends.node(server, node_id) as bus:
        scripted = ScriptedNode(bus, node_id)
        await scripted.start()
        try:
            yield scripted
        finally:
            scripted.silence()


async def test_a_model_reaches_a_node_and_its_readiness_the_log(nats: NatsServer) -> None:  # noqa: F811
    """Register, plan, tell, load, record: and the decision says why, from which position."""
    plane = Plane(nats)
    async with plane.running(), agent(nats, "n1") as n1:
        await until(lambda: "NodeJoined" in plane.names("n1"))
        plane.add_model()
        await until(lambda: "ReplicaBecameReady" in plane.names("n1"), what="ready")
        assert n1.runs() == ["m.v1.g1.0"]
        assert n1.desired.replicas[0].source == "simulated://m"
        await until(lambda: "NodeAcknowledged" in plane.names("n1"))
        first = plane.decisions()[0]
        start = first.started[0]
        assert (start.assignment.node_id, start.assignment.device_index) == ("n1", 0)
        assert start.candidates[0].node_id == "n1" and "m@v1 goes to n1/0" in start.reason
        assert 0 < first.planned_from < plane.store.head().position
        assert len(plane.decisions()) == 1, "nothing is decided twice"


async def test_what_does_not_fit_is_said_once(nats: NatsServer) -> None:  # noqa: F811
    """An unplaced version is one decision with its reasons, not one per round."""
    plane = Plane(nats)
    plane.add_model("huge", min_replicas=2, max_replicas=2)
    async with plane.running() as controller:
        await until(lambda: len(plane.decisions()) == 1)  # no node yet
        async with agent(nats, "n1"):
            await until(lambda: len(plane.decisions()) == 2)  # one of two placed
            await asyncio.sleep(0.6)
            assert len(plane.decisions()) == 2
            gap = plane.decisions()[-1].unplaced[0]
            assert (gap.num_missing, gap.code) == (1, "already_here")
            assert controller.state.unplaced_reason("huge@v1") == gap.reason


async def test_a_silent_node_is_suspected_lost_and_its_work_placed_elsewhere(
    nats: NatsServer,  # noqa: F811
) -> None:
    plane = Plane(nats)
    plane.add_model()
    async with plane.running(), agent(nats, "n1") as n1, agent(nats, "n2") as n2:
        await until(lambda: n1.runs() or n2.runs())
        victim, other = (n1, n2) if n1.runs() else (n2, n1)
        await until(lambda: "ReplicaBecameReady" in plane.names(victim.node_id))
        victim.silence()
        await until(lambda: "NodeLost" in plane.names(victim.node_id))
        assert "NodeSuspected" in plane.names(victim.node_id)
        await until(lambda: other.runs() and "ReplicaBecameReady" in plane.names(other.node_id))
        stops = [stop for one in plane.decisions() for stop in one.stopped]
        assert [(stop.code, stop.assignment.node_id) for stop in stops] == [
            ("node_lost", victim.node_id)
        ]
        assert victim.runs() == [], "its desired state is empty for when it returns"
        victim.revive()
        await until(lambda: "NodeRecovered" in plane.names(victim.node_id))
        assert len(other.runs()) == 1, "what was moved stays"


async def test_a_lost_node_that_was_removed_joins_anew(nats: NatsServer) -> None:  # noqa: F811
    """The same agent, never restarted: what it last said of itself does not bring it back, its
    voice does; and it gets work again."""
    plane = Plane(nats)
    plane.add_model()
    async with plane.running() as controller, agent(nats, "n1") as n1:
        await until(lambda: "ReplicaBecameReady" in plane.names("n1"))
        n1.silence()
        await until(lambda: "NodeLost" in plane.names("n1"))
        plane.handler.handle(node.DECIDER, "node-n1", RemoveNode(NodeId("n1"), 9.0), META)
        await until(lambda: controller.state.nodes["n1"].status == "absent")
        await asyncio.sleep(0.6)
        assert plane.names("n1")[-1] == "NodeRemoved"
        n1.revive()
        await until(lambda: plane.names("n1").count("ReplicaBecameReady") == 2)
        after = plane.names("n1")[plane.names("n1").index("NodeRemoved") + 1 :]
        assert after[0] == "NodeJoined" and len(n1.runs()) == 1


async def test_a_restarted_node_gets_the_same_again(nats: NatsServer) -> None:  # noqa: F811
    """Another boot id: it joins anew, its replica is loaded again, nothing is moved."""
    plane = Plane(nats)
    plane.add_model()
    async with plane.running(), agent(nats, "n1") as n1:
        await until(lambda: "ReplicaBecameReady" in plane.names("n1"))
        before = n1.runs()
        n1.boot, n1.seq = "b2", 0
        await n1.report()
        await until(lambda: plane.names("n1").count("ReplicaBecameReady") == 2)
        assert plane.names("n1").count("NodeJoined") == 2
        assert n1.runs() == before
        assert [d for d in plane.decisions() if d.stopped] == []


async def test_retire_and_drain_take_replicas_away(nats: NatsServer) -> None:  # noqa: F811
    """Drain moves without a gap: the new one is ready before the old one stops."""
    plane = Plane(nats)
    plane.add_model()
    async with plane.running(), agent(nats, "n1") as n1, agent(nats, "n2") as n2:
        await until(lambda: n1.runs() or n2.runs())
        source, target = (n1, n2) if n1.runs() else (n2, n1)
        await until(lambda: "ReplicaBecameReady" in plane.names(source.node_id))
        order = DrainNode(source.node_id, "maintenance", plane.clock.now())  # type: ignore[arg-type]
        plane.handler.handle(node.DECIDER, f"node-{source.node_id}", order, META)
        await until(lambda: target.runs() and not source.runs())
        assert source.desired.drain
        codes = [stop.code for one in plane.decisions() for stop in one.stopped]
        assert codes == ["node_draining"]
        ready = plane.names().index("ReplicaBecameReady", plane.names().index("NodeDrainStarted"))
        assert ready < len(plane.names()) - plane.names()[::-1].index("PlacementDecided")
        retire = RetireVersion("m", "v1", plane.clock.now())
        plane.handler.handle(model.DECIDER, "model-m", retire, META)
        await until(lambda: not target.runs())


async def test_a_failing_version_stays_and_takes_no_further_decision(
    nats: NatsServer,  # noqa: F811
) -> None:
    """Its node tries again; with another node it moves there, once."""
    plane = Plane(nats)
    async with plane.running(), agent(nats, "n1") as n1:
        n1.state = "failed"
        plane.add_model()
        await until(lambda: "ReplicaFailed" in plane.names("n1"))
        before = len(plane.decisions())
        await asyncio.sleep(0.5)
        assert len(plane.decisions()) == before and len(n1.runs()) == 1
        async with agent(nats, "n2"):
            await until(lambda: "ReplicaBecameReady" in plane.names("n2"))
            await asyncio.sleep(0.5)
        (stopped,) = plane.decisions()[-1].stopped
        assert (stopped.code, stopped.assignment.node_id) == ("failed", "n1")
        assert plane.names("n1").count("ReplicaFailed") == 1


async def test_one_that_waits_for_room_is_told_of_and_moves(nats: NatsServer) -> None:  # noqa: F811
    """From the node's words on the bus to a decision, and to the gauge."""
    plane = Plane(nats)
    plane.add_model()
    deadlines = Deadlines(waiting_s=0.4)
    async with plane.running(deadlines=deadlines) as controller, agent(nats, "n1") as n1:
        n1.state = "pending"
        await until(lambda: "ReplicaOverdue" in plane.names("n1"))
        told = controller.state.nodes["n1"].failures["m@v1"]
        starts = [one for one in plane.decisions() if one.started]
        assert told[0] == "no_room" and len(starts) == 1
        gauges = ControllerMetrics(controller).render().decode()
        assert 'engine_stuck_replicas{code="waiting"} 1.0' in gauges
        async with agent(nats, "n2"):
            await until(lambda: "ReplicaBecameReady" in plane.names("n2"))
            (stopped,) = plane.decisions()[-1].stopped
            assert (stopped.code, stopped.assignment.node_id) == ("no_room", "n1")
            before = len(plane.decisions())
            await asyncio.sleep(0.5)
            assert len(plane.decisions()) == before


async def test_only_one_leads_and_a_standby_takes_over(nats: NatsServer) -> None:  # noqa: F811
    """The epoch grows, every node is told under it, and nothing is decided twice."""
    plane = Plane(nats)
    plane.add_model()
    async with plane.running(holder="b") as second, agent(nats, "n1") as n1:
        await until(lambda: second.leads)
        async with plane.running(holder="a") as first:
            await until(lambda: n1.runs())
            await until(lambda: first.stats["lease"].num_rounds > 3)
            assert not first.leads
        async with plane.running(holder="c") as third:
            await _end(second)
            await until(lambda: third.leads, 5)
            await until(lambda: n1.history[-1][0] == 2, what="told again under the new epoch")
            assert len(n1.runs()) == 1
            assert len([d for d in plane.decisions() if d.started]) == 1


async def _end(controller: Controller) -> None:
    """Make the controller lose its lease as a hung process does: it stops renewing."""
    controller._acquire = lambda: None  # type: ignore[method-assign]
    controller._give_back()


async def test_a_log_that_went_back_is_not_published_and_its_nodes_say_why(
    nats: NatsServer,  # noqa: F811
) -> None:
    """The bus and the node hold a newer epoch than the lease, which is ours: nothing is written,
    and n1 is stuck with the operator's step. Under a later epoch it follows again."""
    plane = Plane(nats)
    deadlines = Deadlines(accepted_s=0.3)
    async with ends.control(nats) as bus, agent(nats, "n1") as n1:
        future = DesiredState(cluster_id="test", epoch=9, generation=1, node_id="n1")
        bucket = await bus.jetstream().key_value("desired")
        await bucket.put("n1", encode(future))
        await until(lambda: n1.history)
        plane.add_model()
        async with plane.running(deadlines=deadlines) as controller:
            await until(lambda: "NodeOverdue" in plane.names("n1"))
            (told,) = [one.event for one in plane.store.read_stream("node-n1")
                       if isinstance(one.event, node.NodeOverdue)]  # fmt: skip
            assert told.code == "refused" and "advance_epoch 9" in told.reason
            assert 'engine_stuck_nodes{code="refused"} 1.0' in (
                ControllerMetrics(controller).render().decode()
            )
            assert decode((await bucket.get("n1")).value, DesiredState) == future
        for number in range(10):  # ten leaders later the epoch is past it
            plane.store.acquire_lease(CONTROLLER_LEASE, f"c{number}", 0.0, plane.clock.now())
        async with plane.running(deadlines=deadlines) as controller:
            await until(lambda: n1.runs())
            await until(lambda: controller.state.nodes["n1"].late == "")


async def test_a_leader_that_was_overtaken_steps_down(nats: NatsServer) -> None:  # noqa: F811
    """The bus holds a newer epoch, and the lease is another's: it must not write, nor does it."""
    plane = Plane(nats)
    async with ends.control(nats) as bus, agent(nats, "n1"):
        plane.add_model()
        async with plane.running() as controller:
            await until(lambda: plane.decisions())
            await until(lambda: controller.publisher and controller.publisher.num_written)
            await _end(controller)
            future = DesiredState(cluster_id="test", epoch=99, generation=1, node_id="n1")
            await (await bus.jetstream().key_value("desired")).put("n1", encode(future))
            await until(lambda: controller.publisher is None or not controller.leads)
            entry = await (await bus.jetstream().key_value("desired")).get("n1")
            assert decode(entry.value, DesiredState) == future


async def test_a_bus_that_lost_everything_is_filled_again(nats: NatsServer) -> None:  # noqa: F811
    """Server gone, store wiped: desired state is back within seconds, nothing is moved."""
    plane = Plane(nats)
    plane.add_model()
    async with plane.running() as controller, agent(nats, "n1") as n1:
        await until(lambda: "ReplicaBecameReady" in plane.names("n1"))
        before, num_told = n1.runs(), len(n1.history)
        nats.stop(kill=True)
        nats.wipe()
        await asyncio.sleep(0.3)
        nats.start()
        async with asyncio.timeout(15):
            while len(n1.history) == num_told:
                with suppress(NatsError):  # the bus is on its way up
                    await n1.look()
        assert n1.runs() == before
        await until(lambda: not controller.problems(), 5)
        assert [d for d in plane.decisions() if d.stopped] == []


_FOLLOWED = 'engine_projection_lag_events{projection="readmodel"} 0.0'


async def test_the_probes_say_how_it_is(nats: NatsServer) -> None:  # noqa: F811
    """Ready once it works; metrics name the leader, the nodes and who has not acknowledged."""
    plane = Plane(nats)
    plane.add_model()
    async with plane.running() as controller, agent(nats, "n1"):
        await until(lambda: "ReplicaBecameReady" in plane.names("n1"))
        probes = probes_of(controller)
        port = await probes.start("127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/livez")).status_code == 200
            await _eventually(lambda: client.get("/readyz"))
            async with asyncio.timeout(5):
                while _FOLLOWED not in (text := (await client.get("/metrics")).text):
                    await asyncio.sleep(0.05)
            assert (await client.get("/admin")).status_code == 404
            assert (await client.post("/livez")).status_code == 405
        probes.close()
    for line in (
        "engine_controller_leader 1.0",
        'engine_nodes{status="ready"} 1.0',
        'engine_replicas{state="ready"} 1.0',
        'engine_events_appended_total{type="ModelRegistered"} 1.0',
        "engine_desired_overdue_nodes 0.0",
        'engine_node_gpu_utilization_ratio{device="0",node="n1"} 0.25',
    ):
        assert line in text, line


async def _eventually(get: Callable[[], Awaitable[httpx.Response]]) -> None:
    async with asyncio.timeout(5):
        while (await get()).status_code != 200:
            await asyncio.sleep(0.05)


async def test_without_a_bus_it_is_not_ready_and_says_why(nats: NatsServer) -> None:  # noqa: F811
    plane = Plane(nats)
    nats.stop()
    async with plane.running() as controller:
        await until(lambda: controller.stats["lease"].num_rounds)
        assert controller.problems() == ["the message bus is not connected"] or controller.leads
        assert "the message bus is not connected" in controller.problems()
        nats.start()
        await until(lambda: not controller.problems(), 8)


async def test_a_loop_that_swallows_a_cancellation_still_ends() -> None:
    """What ``wait_for`` of Python 3.11 does when its own wait ends in the same moment."""

    async def deaf() -> None:
        for _ in range(3):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    tasks = [asyncio.create_task(deaf()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await end_tasks(tasks)
    assert all(task.done() for task in tasks)
