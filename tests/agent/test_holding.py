"""What is held and asked for, on a table of replicas without workers."""

from types import SimpleNamespace

from gpuagent.agent import ipc
from gpuagent.agent.replicas import ReplicaTable
from gpuagent.agent.tiers import Tiers
from gpuagent.wire.messages import DesiredState, Generate, Sampling, TokenizerBundle
from tests.agent.harness import GIB, spec

A = spec("a", memory_bytes=GIB // 2)
WANTED = DesiredState(cluster_id="c", epoch=1, generation=1, node_id="n1", replicas=(A,))
ROOMS = {0: GIB}


def made(peak_bytes: int = GIB // 2) -> tuple[ReplicaTable, Tiers]:
    """``a`` is resident and idle."""
    table = ReplicaTable(lambda: 100.0, lambda: 100.0, lambda: None)
    host = SimpleNamespace(is_on_several=lambda replica_id: False)
    tiers = Tiers(table, host, lambda replica_id: 0, 10.0, 4 * GIB)  # type: ignore[arg-type]
    table.start(A)
    bundle = TokenizerBundle(version_id="m@1", tokenizer_json=b"{}")
    table.became_ready(ipc.Loaded("a", 1, 2, peak_bytes, 0.5, "sha", 2048, bundle))
    return table, tiers


def ask(name: str) -> Generate:
    return Generate(
        request_id=name, gateway="gw", replica_id="a", prompt_token_ids=(1,),
        sampling=Sampling(max_tokens=1),
    )  # fmt: skip


def put_out(table: ReplicaTable) -> None:
    table.move("a", "out")
    table.swapped(ipc.Swapped("a", "host", 0.01, GIB // 4))


def test_only_what_is_not_resident_is_held_and_given_back_in_order() -> None:
    table, tiers = made()
    assert not tiers.hold(ask("r0")) and tiers.release("a") == []
    put_out(table)
    assert tiers.hold(ask("r1")) and tiers.hold(ask("r2")) and tiers.num_held("a") == 2
    assert tiers.decide(WANTED, ROOMS, 100.0).bring_in == ("a",)
    table.move("a", "in")
    assert tiers.decide(WANTED, ROOMS, 100.0).bring_in == (), "once"
    assert tiers.hold(ask("r3")) and tiers.release("a") == []
    table.swapped(ipc.Swapped("a", "resident", 0.01))
    assert [request.request_id for request in tiers.release("a")] == ["r1", "r2", "r3"]
    assert not tiers.is_anyone_waiting()


def test_who_has_cancelled_everything_no_longer_asks() -> None:
    table, tiers = made()
    put_out(table)
    tiers.hold(ask("r1"))
    assert tiers.cancel("a", "r1") and not tiers.cancel("a", "r1")
    assert tiers.take_cancelled() == ["r1"] and tiers.take_cancelled() == []
    assert not tiers.is_anyone_waiting()


def test_what_measured_more_than_the_device_offers_may_be_there_alone() -> None:
    """Not put out for its own size, and let in again: else its requests would wait for ever."""
    table, tiers = made(peak_bytes=2 * GIB)
    assert tiers.decide(WANTED, ROOMS, 100.0).swap_out == ()
    put_out(table)
    tiers.hold(ask("r1"))
    assert tiers.decide(WANTED, ROOMS, 100.0).bring_in == ("a",)


def test_what_is_no_longer_desired_asks_for_nothing() -> None:
    table, tiers = made()
    put_out(table)
    tiers.hold(ask("r1"))
    nothing = DesiredState(cluster_id="c", epoch=1, generation=2, node_id="n1")
    assert tiers.decide(nothing, ROOMS, 100.0).bring_in == ()


def test_the_wait_is_what_the_way_in_took_last_and_the_rest_of_others_turns() -> None:
    table, tiers = made()
    replica = table.get("a")
    assert replica is not None and tiers.expected_wait(replica) == 0.0
    put_out(table)
    replica.seconds_from["host"] = 0.25
    assert tiers.expected_wait(replica) == 0.25
    replica.tier = "storage"
    replica.seconds_from["storage"] = 4.0
    assert tiers.expected_wait(replica) == 4.0
