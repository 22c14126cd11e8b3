"""Two workers' parts of one replica, put together without processes: nothing is lost or left over.

The real engines (simulated), exchanges, shared memory and bookkeeping; only the sockets are queues,
so that messages overtake one another's causes in every way that sockets allow.
"""

import os
import random
from collections import deque

import pytest

from gpuagent.agent import arena, ipc
from gpuagent.agent.arena import Arena
from gpuagent.agent.backends.simulated import SimulatedEngine, SimulatedParams
from gpuagent.agent.exchange import Exchange
from gpuagent.agent.pairs import DECODE, PREFILL, ROLES, Pair
from gpuagent.agent.translate import to_engine
from gpuagent.wire.messages import Delta, Generate, Sampling
from tests.agent.harness import spec

PARAMS = SimulatedParams(step_ms=0, prefill_tps=1e9, load_ms=0)


def test_regions_are_given_first_fit_and_back() -> None:
    shared = Arena(arena.create(1000))
    first, second, third = (shared.take(300) for _ in range(3))
    assert (first, second, third) == ((0, 300), (320, 300), (640, 300))
    assert shared.take(100) is None
    shared.give_back(320)
    assert shared.take(321) is None and shared.take(200) == (320, 200)
    shared.view(third)[:3] = b"abc"  # type: ignore[arg-type]
    assert bytes(shared.view(third)[:4]) == b"abc\0"  # type: ignore[arg-type]


class Side:
    """One worker: engine, exchange, and what is on its way to and from the agent."""

    def __init__(self, role: str, descriptor: int, engine: SimulatedEngine) -> None:
        self.role, self.engine = role, engine
        self.inbox: deque[ipc.ToWorker] = deque()
        self.outbox: deque[ipc.FromWorker] = deque()
        self.exchange = Exchange(descriptor, self.outbox.append)

    def receive(self) -> None:
        match self.inbox.popleft():
            case ipc.Add(request=request):
                self.engine.add(to_engine(request))
            case ipc.Cancel(request_id=name):
                self.engine.cancel(name)
                self.exchange.cancel(name)
            case ipc.Adopt() as message:
                self.exchange.adopt(message)
            case ipc.Free(start=start):
                self.exchange.free(start)

    def step(self) -> None:
        if self.engine.has_work():
            deltas = [
                Delta(o.request_id, o.index, o.token_ids, o.text, o.finish_reason or "")
                for o in self.engine.step()
            ]
            self.outbox.append(ipc.StepOutputs("m", deltas))
            if self.role == PREFILL:
                self.exchange.hand_over("m", self.engine)
        self.exchange.settle(self.engine)


class Bench:
    """Both sides, the pair between them, and everything that reached the clients."""

    def __init__(self, num_bytes: int, **options: int) -> None:
        descriptor = arena.create(num_bytes)
        wanted = spec(max_batch=4, max_batch_tokens=64, max_model_len=256)
        self.pair = Pair("m")
        self.sides = {
            role: Side(role, os.dup(descriptor), SimulatedEngine(wanted, PARAMS, role))
            for role in ROLES
        }
        os.close(descriptor)
        self.deltas: dict[str, list[Delta]] = {}

    def order(self, orders: list[tuple[str, ipc.ToWorker]]) -> None:
        for role, message in orders:
            self.sides[role].inbox.append(message)

    def relay(self, role: str) -> None:
        """The agent reads one message of a worker."""
        match self.sides[role].outbox.popleft():
            case ipc.StepOutputs() as outputs:
                self.pair.ended(outputs)
                for delta in outputs.deltas:
                    self.deltas.setdefault(delta.request_id, []).append(delta)
            case ipc.HandOver() as message:
                self.order(self.pair.handed_over(message))
            case ipc.Taken(start=start):
                self.order([(PREFILL, ipc.Free(start))])

    def moves(self) -> list[tuple[str, str]]:
        """What could happen next."""
        found = []
        for role, side in self.sides.items():
            found += [("receive", role)] if side.inbox else []
            found += [("relay", role)] if side.outbox else []
            busy = side.engine.has_work() or side.exchange.is_waiting
            found += [("step", role)] if busy else []
        return found

    def move(self, kind: str, role: str) -> None:
        if kind == "relay":
            self.relay(role)
        else:
            getattr(self.sides[role], kind)()

    def settle(self) -> None:
        while moves := self.moves():
            self.move(*moves[0])

    def assert_nothing_left(self) -> None:
        assert not self.pair.prefilling and not self.pair.decoding and not self.pair._cancelled
        assert self.sides[PREFILL].exchange._arena.num_taken == 0
        for side in self.sides.values():
            scheduler = side.engine._scheduler
            assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
            assert scheduler.host.num_free == scheduler.host.num_blocks
            assert not side.engine._streams


def ask(name: str, num_prompt: int, max_tokens: int, **fields: object) -> Generate:
    sampling = Sampling(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    prompt = tuple((i * 7 + len(name)) % 250 for i in range(num_prompt))
    return Generate(
        request_id=name, gateway="g", replica_id="m", prompt_token_ids=prompt, sampling=sampling
    )


def alone(request: Generate) -> tuple[list[int], str]:
    engine = SimulatedEngine(spec(max_batch=4, max_model_len=256), PARAMS)
    engine.add(to_engine(request))
    tokens, text = [], ""
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
            text += output.text
    return tokens, text


@pytest.mark.parametrize("num_bytes", [64, 4_000, 1 << 20])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_order_each_request_ends_once_and_as_if_alone(
    num_bytes: int, seed: int
) -> None:
    """Also where the memory holds nobody (64 bytes), and where requests wait for it."""
    rng, bench = random.Random(seed), Bench(num_bytes)
    requests = [ask(f"r{i}", rng.randint(1, 90), rng.randint(1, 40)) for i in range(12)]
    waiting, cancelled = list(requests), set()
    while waiting or bench.moves():
        chance = rng.random()
        if waiting and chance < 0.1:
            bench.order(bench.pair.add(waiting.pop()))
        elif chance < 0.13:
            victim = rng.choice(requests).request_id
            if victim not in {w.request_id for w in waiting}:
                cancelled.add(victim)
                bench.order(bench.pair.cancel(victim))
        elif moves := bench.moves():
            bench.move(*rng.choice(moves))
    bench.assert_nothing_left()
    for request in requests:
        deltas = bench.deltas[request.request_id]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert [bool(d.finish_reason) for d in deltas] == [False] * (len(deltas) - 1) + [True]
        assert [d.index for d in deltas] == sorted(d.index for d in deltas)
        expected, text = alone(request)
        if request.request_id not in cancelled:
            assert (tokens, "".join(d.text for d in deltas)) == (expected, text)
        else:
            assert tokens == expected[: len(tokens)]


def test_a_cancel_that_crosses_a_hand_over_ends_the_request() -> None:
    bench = Bench(1 << 20)
    bench.order(bench.pair.add(ask("a", 20, 100)))
    prefill = bench.sides[PREFILL]
    prefill.receive()
    prefill.step()
    assert not prefill.engine.decoding(), "it is on its way"
    bench.order(bench.pair.cancel("a"))
    bench.settle()
    assert bench.deltas["a"][-1].finish_reason == "cancelled"
    assert len(bench.deltas["a"]) == 2
    bench.assert_nothing_left()


def test_a_request_larger_than_all_host_blocks_is_computed_anew() -> None:
    bench = Bench(1 << 20)
    decode = bench.sides[DECODE].engine._scheduler
    decode.host.pool.allocate(decode.host.num_blocks - 2)  # type: ignore[union-attr]
    request = ask("a", 90, 10)
    bench.order(bench.pair.add(request))
    bench.settle()
    tokens = [token for delta in bench.deltas["a"] for token in delta.token_ids]
    assert tokens == alone(request)[0]
    assert bench.sides[PREFILL].exchange._arena.num_taken == 0


def test_a_stop_string_may_begin_before_the_hand_over() -> None:
    plain = alone(ask("a", 20, 30))[1]
    stop = plain[len(plain.split(" ")[0]) - 1 :][:6]
    request = ask("a", 20, 30, stop=(stop,))
    bench = Bench(1 << 20)
    bench.order(bench.pair.add(request))
    bench.settle()
    assert "".join(d.text for d in bench.deltas["a"]) == alone(request)[1]
    assert bench.deltas["a"][-1].finish_reason == "stop"


def loaded(weights: int) -> ipc.Loaded:
    bundle = ipc.TokenizerBundle(version_id="m@1", tokenizer_json=b"{}")
    return ipc.Loaded("m", weights, 2, 3, weights / 10, "sha", 2048 - weights, bundle)


def test_the_replica_is_loaded_when_both_are_and_counts_both() -> None:
    pair = Pair("m")
    assert pair.loaded(DECODE, loaded(1)) is None
    both = pair.loaded(PREFILL, loaded(5))
    assert both is not None
    assert (both.weights_bytes, both.kv_bytes, both.peak_bytes) == (6, 4, 6)
    assert (both.load_seconds, both.max_model_len) == (0.5, 2043)
    assert not pair.unloaded(PREFILL) and pair.unloaded(DECODE)


def test_the_replicas_counters_are_both_workers_added_up() -> None:
    pair = Pair("m")
    older = ipc.ReplicaStats(
        "m", num_steps=3, prefill_tokens=50, waiting_by_class={"batch": 1, "standard": 2}
    )
    pair.stats(PREFILL, ipc.Stats([older]))
    waiting = {"batch": 1}
    newer = ipc.ReplicaStats(
        "m", num_steps=9, decode_tokens=8, num_blocks=4, waiting_by_class=waiting
    )
    (entry,) = pair.stats(DECODE, ipc.Stats([newer])).replicas
    assert (entry.num_steps, entry.prefill_tokens, entry.decode_tokens) == (12, 50, 8)
    assert (entry.num_blocks, entry.block_size, entry.replica_id) == (4, 16, "m")
    assert entry.waiting_by_class == {"batch": 2, "standard": 2}
