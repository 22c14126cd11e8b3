"""A replica over two nodes: real agents that share a fabric (the loopback), real workers."""

import asyncio
import os
import signal
import socket
from contextlib import suppress

import msgspec
import psutil
import pytest

from gpuagent.agent import fabric, groups
from gpuagent.agent.fabric import Fabric, NotJoined, Tie, interface_of, join
from gpuagent.agent.joint import ENDED
from gpuagent.agent.reconcile import reconcile
from gpuagent.agent.replicas import backoff
from gpuagent.wire.messages import Device, GroupPart, ReplicaSpec
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Control, eventually, spec
from tests.agent.test_groups import DEADLINE_S, GREEDY, model, ranks, streamed
from tests.engine.tiny_model import uneven_tiny_model

pytestmark = pytest.mark.timeout(400)

GROUP = "g.1.g1.0"
SECRET = b"one placement's own secret, 32 b"
SHORT = msgspec.structs.replace(GREEDY, max_tokens=10)
SIMULATED = "simulated://m?step_ms=10&prefill_tps=100000"


class Nodes:
    """Agents with a device each, and a group of as many ranks on all of them."""

    def __init__(
        self, plane: Control, start_agent: StartAgent, *options: str, number: int = 2
    ) -> None:
        self.plane = plane
        roots = str(uneven_tiny_model().parent)
        on_it = ("--fabric", "ib", "--fabric-address", "127.0.0.1", "--file-roots", roots)
        self.names = [f"n{i}" for i in range(1, number + 1)]
        self.agents = [start_agent(name, *on_it, *options) for name in self.names]
        self.first, self.second = self.agents[:2]

    async def place(
        self, whole: ReplicaSpec, *beside: ReplicaSpec, generation: int = 1, secret: bytes = SECRET
    ) -> None:
        """As the control plane tells it, which has learnt the address by then."""
        address = await self.address("n1")
        for rank, name in enumerate(self.names):
            group = GroupPart(ranks=(rank,), address=address if rank else "", secret=secret)
            part = msgspec.structs.replace(whole, device_indices=(0,), group=group)
            others = () if rank else beside
            await self.plane.place(name, part, *others, generation=generation)

    async def address(self, node_id: str) -> str:
        for _ in range(600):
            observed = await self.plane.observed(node_id)
            if observed and observed.fabric_address:
                return observed.fabric_address
            await asyncio.sleep(0.05)
        raise AssertionError(f"{node_id} has no address on the fabric")

    async def ready(self) -> dict[int, psutil.Process]:
        """The workers by rank, once the replica serves."""
        await self.plane.replica("n1", "ready", GROUP, DEADLINE_S)
        return self.workers()

    def workers(self) -> dict[int, psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for agent in self.agents:
            with suppress(psutil.Error):
                found |= ranks(agent)
        return found


def simulated(size: int = 2) -> ReplicaSpec:
    return spec(GROUP, tensor_parallel=size, memory_bytes=GIB // 4, source=SIMULATED)


def are_gone(old: dict[int, psutil.Process]) -> bool:
    return not any(each.is_running() for each in old.values())


async def test_two_nodes_stream_what_one_device_does(
    plane: Control, start_agent: StartAgent
) -> None:
    """One replica, which the first node speaks for; each counts its share of the memory. Killed on
    the second node while it streams, it ends with one typed error and answers as before after."""
    nodes = Nodes(plane, start_agent)
    await nodes.place(model(2, GROUP), model(1, "one.1.g1.0"))
    await plane.replica("n1", "ready", "one.1.g1.0", DEADLINE_S)
    old = await nodes.ready()
    assert sorted(ranks(nodes.first)) == [0] and sorted(ranks(nodes.second)) == [1]
    expected = await streamed(plane, "one.1.g1.0", 3, SHORT)
    assert await streamed(plane, GROUP, 3, SHORT) == expected

    second = await plane.observed("n2")
    assert second and second.replicas == ()
    await eventually(
        lambda: all(plane.telemetry[name].devices[0].kv_pool_bytes for name in ("n1", "n2"))
    )
    assert plane.load("n1", GROUP) and not plane.load("n2", GROUP)
    lost = await plane.generate("n2", 5, GROUP)
    assert (await plane.terminal(lost)).error_code == "replica_not_ready"

    long = msgspec.structs.replace(GREEDY, max_tokens=180)
    asked = await plane.generate("n1", 0, GROUP, sampling=long)
    await plane.started(asked, 2)
    old[1].kill()
    last = await plane.terminal(asked)
    assert (last.finish_reason, last.error_code) == ("error", "engine_lost")
    await eventually(lambda: are_gone(old))
    await eventually(lambda: len(nodes.workers()) == 2, DEADLINE_S)
    await nodes.ready()
    assert await streamed(plane, GROUP, 3, SHORT) == expected


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_death_of_a_rank_ends_both_parts_also_at_rest(
    plane: Control, start_agent: StartAgent, rank: int
) -> None:
    """Nobody asks for anything, so no sum fails: the agents tell each other."""
    nodes = Nodes(plane, start_agent)
    await nodes.place(simulated())
    old = await nodes.ready()
    old[rank].kill()
    await eventually(lambda: are_gone(old))
    await eventually(lambda: len(nodes.workers()) == 2)
    await nodes.ready()
    asked = await plane.generate("n1", 5, GROUP)
    assert (await plane.terminal(asked)).finish_reason == "length"


async def test_of_three_nodes_the_death_on_one_ends_all(
    plane: Control, start_agent: StartAgent
) -> None:
    """The third hears of it from the first, in the words of the second."""
    nodes = Nodes(plane, start_agent, number=3)
    await nodes.place(simulated(3))
    await nodes.ready()
    await eventually(lambda: len(nodes.workers()) == 3)
    old = nodes.workers()
    old[1].kill()
    await eventually(lambda: are_gone(old))
    await eventually(lambda: len(nodes.workers()) == 3)
    await nodes.ready()
    assert '"on another node: the rank 1 worker was ended by signal 9"' in nodes.agents[2].log


async def test_the_second_agent_stopped_is_a_typed_end_and_its_return_a_new_beginning(
    plane: Control, start_agent: StartAgent
) -> None:
    nodes = Nodes(plane, start_agent, "--group-start-seconds", "3")
    await nodes.place(simulated())
    old = await nodes.ready()
    asked = await plane.generate("n1", 2000, GROUP)
    await plane.started(asked, 3)
    nodes.second.stop()
    last = await plane.terminal(asked)
    assert (last.finish_reason, last.error_code) == ("error", "engine_lost")
    assert "on another node: its agent was stopped" in last.error_message
    await eventually(lambda: are_gone(old))
    await until_reason(plane, "group_incomplete")
    nodes.second.start()
    await nodes.ready()
    assert len(nodes.workers()) == 2


async def test_an_agent_that_is_killed_takes_both_parts_along(
    plane: Control, start_agent: StartAgent
) -> None:
    nodes = Nodes(plane, start_agent, "--group-start-seconds", "3")
    await nodes.place(simulated())
    old = await nodes.ready()
    asked = await plane.generate("n1", 2000, GROUP)
    await plane.started(asked, 3)
    nodes.second.stop(signal.SIGKILL)
    assert (await plane.terminal(asked)).error_code == "engine_lost"
    await eventually(lambda: are_gone(old))
    await until_reason(plane, "group_incomplete")


async def test_a_rank_elsewhere_that_stands_still_is_a_hang_of_the_replica(
    plane: Control, start_agent: StartAgent
) -> None:
    nodes = Nodes(plane, start_agent, "--watchdog-seconds", "10")
    await nodes.place(model(2, GROUP))
    old = await nodes.ready()
    os.kill(old[1].pid, signal.SIGSTOP)
    asked = await plane.generate("n1", 0, GROUP, sampling=GREEDY)
    assert (await plane.terminal(asked, DEADLINE_S)).error_code == "engine_lost"
    await eventually(lambda: are_gone(old))
    await eventually(lambda: len(nodes.workers()) == 2, DEADLINE_S)
    await nodes.ready()
    assert len(await streamed(plane, GROUP, 2, SHORT)) == 2


async def test_a_retired_group_finishes_what_runs_and_leaves_nothing(
    plane: Control, start_agent: StartAgent
) -> None:
    """The second node waits for the first, whichever hears of it sooner."""
    nodes = Nodes(plane, start_agent)
    await nodes.place(simulated())
    old = await nodes.ready()
    asked = await plane.generate("n1", 100, GROUP)
    await plane.started(asked, 3)
    await plane.place("n2", generation=2)
    await asyncio.sleep(0.3)
    await plane.place("n1", generation=2)
    assert (await plane.terminal(asked)).finish_reason == "length"
    await eventually(lambda: are_gone(old))
    assert nodes.workers() == {}


async def test_an_agent_at_another_placement_does_not_join(
    plane: Control, start_agent: StartAgent
) -> None:
    """Its secret is another one; told the right one, it does."""
    nodes = Nodes(plane, start_agent, "--group-start-seconds", "3")
    await nodes.place(simulated())
    await plane.place("n1", generation=2)
    await plane.place("n2", generation=2)
    await eventually(lambda: not nodes.workers())
    newer = msgspec.structs.replace(
        simulated(), device_indices=(0,), group=GroupPart(ranks=(0,), secret=b"newer" * 8)
    )
    address = await nodes.address("n1")
    older = GroupPart(ranks=(1,), address=address, secret=SECRET)
    await plane.place("n1", newer, generation=3)
    await plane.place("n2", msgspec.structs.replace(newer, group=older), generation=3)
    await until_reason(plane, "group_incomplete")
    assert not nodes.workers()
    metrics = nodes.first.get("/metrics")[1]
    (counted,) = [line for line in metrics.splitlines() if 'kind="fabric_refused"' in line]
    assert float(counted.split()[-1]) > 0


async def test_why_a_node_has_no_part_is_said_by_the_first(
    plane: Control, start_agent: StartAgent
) -> None:
    nodes = Nodes(plane, start_agent, "--group-start-seconds", "60")
    address = await nodes.address("n1")
    whole = simulated()
    parts = [
        msgspec.structs.replace(
            whole,
            device_index=index,
            device_indices=(index,),
            group=GroupPart(ranks=(rank,), address=address, secret=SECRET),
        )
        for rank, index in ((0, 0), (1, 7))
    ]
    await plane.place("n1", parts[0])
    await plane.place("n2", parts[1])
    status = await plane.replica("n1", "failed", GROUP, 20)
    assert status.reason_code == "unknown_device"
    assert status.reason == "on another node: there is no device 7"


async def until_reason(plane: Control, code: str) -> None:
    status = await plane.replica("n1", "failed", GROUP, DEADLINE_S)
    for _ in range(400):
        if status.reason_code == code:
            return
        await asyncio.sleep(0.05)
        status = await plane.replica("n1", "failed", GROUP, DEADLINE_S)
    raise AssertionError(status)


# --- parts ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("part", "indices", "bucket"),
    [
        (GroupPart(ranks=(1,), secret=SECRET), (0,), "start"),
        (GroupPart(ranks=(2, 3), secret=SECRET), (0, 1), "start"),
        (GroupPart(ranks=(3, 2), secret=SECRET), (0, 1), "refuse"),
        (GroupPart(ranks=(4,), secret=SECRET), (0,), "refuse"),
        (GroupPart(ranks=(), secret=SECRET), (0,), "refuse"),
        (GroupPart(ranks=(1, 2), secret=SECRET), (0,), "refuse"),
        (GroupPart(ranks=(1,), secret=b"short"), (0,), "refuse"),
    ],
)
def test_a_part_is_ranks_of_its_group_on_devices_of_this_node(
    part: GroupPart, indices: tuple[int, ...], bucket: str
) -> None:
    """It needs its share on each of them, and nothing for the ranks elsewhere."""
    wanted = spec(tensor_parallel=4, memory_bytes=4 * GIB, device_indices=indices, group=part)
    devices = [Device(index=i, kind="cpu", name="cpu", memory_bytes=GIB) for i in (0, 1)]
    (verdict,) = getattr(reconcile([wanted], {}, devices, 0.0), bucket)
    assert verdict.code == ("" if bucket == "start" else "tensor_parallel_unsupported")


def test_a_part_begins_anew_when_rank_0_says_so_and_not_later() -> None:
    assert [backoff(ENDED, n) for n in (1, 5)] == [0.5, 0.5]
    assert backoff("engine_lost", 5) == 8.0


def test_lines_to_other_nodes_take_their_ranks_place() -> None:
    """Of four ranks, two here: rank 0 has a line to each other one, in order; none stays open."""
    pairs = {rank: socket.socketpair() for rank in (2, 3)}
    ours = {rank: pair[0] for rank, pair in pairs.items()}
    numbers = {rank: end.fileno() for rank, end in ours.items()}
    with groups.lines((0, 1), 4, 9.0, ours, "ib0") as places:
        first, second = places
        assert (first.rank, second.rank, first.size, second.size) == (0, 1, 4, 4)
        assert first.lines[1:] == (numbers[2], numbers[3]) and len(second.lines) == 1
        assert {first.interface, second.interface} == {"ib0"}
    assert all(end.fileno() < 0 for end in ours.values())
    theirs = {rank: pair[1] for rank, pair in pairs.items()}
    with groups.lines((2, 3), 4, 9.0, theirs, "ib0") as places:
        assert [len(each.lines) for each in places] == [1, 1]
    assert all(end.fileno() < 0 for end in theirs.values())


# --- the meeting ----------------------------------------------------------------------------------
async def listening() -> Fabric:
    network = Fabric("127.0.0.1")
    await network.start()
    return network


async def test_who_shows_the_secret_has_its_place_and_both_know_each_other() -> None:
    network = await listening()
    gathering = network.gather(SECRET, ["r rank 1", "r agent 1"])
    ours = await join(network.address, SECRET, "r agent 1")
    place, theirs = await gathering.came.get()
    assert place == "r agent 1"
    first, second = await Tie.over("r", ours), await Tie.over("r", theirs)
    first.close(None)
    assert (await second.ended()).code == "engine_lost"
    network.close()


@pytest.mark.parametrize(
    ("secret", "place"),
    [(b"another" * 5, "r rank 1"), (SECRET, "r rank 2"), (b"", "r rank 1"), (SECRET, "s rank 1")],
)
async def test_without_the_secret_or_the_place_nobody_is_let_in(secret: bytes, place: str) -> None:
    network = await listening()
    gathering = network.gather(SECRET, ["r rank 1"])
    with pytest.raises(NotJoined):
        await join(network.address, secret, place)
    assert gathering.came.empty() and network.num_refused == 1
    network.dismiss(gathering)
    with pytest.raises(NotJoined):
        await join(network.address, SECRET, "r rank 1")
    network.close()


async def test_a_listener_that_does_not_know_the_secret_is_left() -> None:
    """It would be told what to compute: whoever took the address of rank 0's agent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def impostor() -> None:
            end, _ = server.accept()
            with end:
                end.sendall(b"c" * 32)
                end.recv(64)
                end.sendall(b"w" * 32)

        talk = asyncio.create_task(asyncio.to_thread(impostor))
        with pytest.raises(NotJoined, match="does not know"):
            await join(f"127.0.0.1:{port}", SECRET, "r rank 1")
        await talk


async def test_whoever_says_nothing_or_something_else_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fabric, "GREETING_S", 0.2)
    network = await listening()
    network.gather(SECRET, ["r rank 1"])
    host, port = fabric.split_address(network.address)
    for said in (b"", b"\x80\x04" * 40):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(said)
        with suppress(ConnectionError):
            assert len(await asyncio.wait_for(reader.read(), 5)) == 32, "the challenge alone"
        writer.close()
    network.close()


def test_an_address_of_another_machine_is_no_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    for wrong in ("192.0.2.1", "ib-east"):
        with pytest.raises(ValueError):
            interface_of(wrong)
