"""An engine worker: the process that owns a device's engines and steps them in turn.

It runs ``python -m gpuagent.agent.worker FD PARENT_PID CONFIG``, started by the engine host with
one end of a socket pair as FD. The loop has no asyncio in it: read what has arrived, give one
engine that has work a step (whose turn it is: ``turns``), send what the step produced. Without
work it blocks in ``poll`` and uses no CPU.

Models are loaded in a thread each, so that the replicas that serve go on serving; the loaded
engine is handed to the loop, which alone calls it from then on.

The worker never outlives its agent: the kernel kills it when the agent dies (PR_SET_PDEATHSIG),
and the end of the pipe says the same.
"""

import ctypes
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import structlog

from gpuagent.agent import ipc
from gpuagent.agent.backends.base import LoadedModel, LoadError, Progress
from gpuagent.agent.exchange import Exchange
from gpuagent.agent.logs import configure_logging
from gpuagent.agent.translate import logprob, to_engine
from gpuagent.agent.turns import Turns
from gpuagent.engine.request import (
    Engine,
    EngineStats,
    HandOver,
    RequestOutput,
    RequestRejected,
)
from gpuagent.engine.shared_pool import Lease, SharedPool
from gpuagent.wire.messages import Delta, Generate, ReplicaSpec

if TYPE_CHECKING:  # torch, of which a simulated model's worker has no need
    from gpuagent.engine.ranks import Follower

log = structlog.get_logger("gpuagent.worker")

PR_SET_PDEATHSIG = 1
STATS_INTERVAL_S = 0.2
FILTER_INTERVAL_S = 1.0
LOADING_SIGN_OF_LIFE_S = 5.0
ELSEWHERE = "vllm"  # the executor whose steps are taken by another process


@dataclass
class _Replica:
    """One engine and what the loop measures around its steps."""

    replica_id: str
    model: LoadedModel
    spec: ReplicaSpec
    is_parked: bool = False
    arrivals: dict[str, float] = field(default_factory=dict)
    busy_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    waited_seconds: float = 0.0
    prefix_filter: bytes = b""
    filter_due: float = 0.0

    def step(self) -> list[Delta]:
        """One engine step, measured; the deltas it produced."""
        before = self.model.engine.stats()
        started = time.monotonic()
        outputs = self.model.engine.step()
        seconds = time.monotonic() - started
        self.busy_seconds += seconds
        self._measure(before, self.model.engine.stats(), seconds)
        return self.deltas(outputs, started)

    def _measure(self, before: EngineStats, after: EngineStats, seconds: float) -> None:
        """What was a wait for another process's step is a part of that step."""
        seconds += self.waited_seconds
        if after.executor == ELSEWHERE and after.num_steps == before.num_steps:
            self.waited_seconds = seconds
            return
        self.waited_seconds = 0.0
        if after.num_prefill_tokens > before.num_prefill_tokens:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.decode_steps += 1

    def deltas(self, outputs: list[RequestOutput], started: float) -> list[Delta]:
        """What a step that began at ``started`` has to say, or a flush."""
        return [self._delta(output, started) for output in outputs]

    @property
    def can_step(self) -> bool:
        """Whether it has work and is where it can do it."""
        return not self.is_parked and self.model.engine.has_work()

    def _delta(self, output: RequestOutput, started: float) -> Delta:
        arrived = self.arrivals.pop(output.request_id, None)
        if output.error_code:
            self._log_failure(output)
        return Delta(
            output.request_id,
            output.index,
            output.token_ids,
            output.text,
            output.finish_reason or "",
            output.error_code or "",
            f"The engine failed: {output.error_type}." if output.error_type else "",
            output.num_prompt_tokens,
            output.num_cached_tokens,
            output.num_output_tokens,
            0.0 if arrived is None else _milliseconds(arrived, output.begun_at or started),
            tuple(logprob(entry) for entry in output.logprobs) if output.logprobs else (),
            output.embeddings,
            output.num_computed_tokens,
        )

    def _log_failure(self, output: RequestOutput) -> None:
        """All of it here, since the client is told no more than the exception's class: its
        message may quote the prompt."""
        log.error(
            "request_failed",
            replica=self.replica_id,
            request=output.request_id,
            code=output.error_code,
            error_type=output.error_type,
            exception=output.error_trace,
        )

    def stats(self) -> ipc.ReplicaStats:
        stats: EngineStats = self.model.engine.stats()
        return ipc.ReplicaStats(
            replica_id=self.replica_id,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_free_blocks=stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            block_size=stats.block_size,
            num_steps=stats.num_steps,
            busy_seconds=self.busy_seconds,
            prefill_tokens=stats.num_prefill_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_tokens=stats.num_decode_tokens,
            decode_steps=self.decode_steps,
            decode_seconds=self.decode_seconds,
            cached_tokens=stats.num_cached_tokens,
            num_preemptions=stats.num_preemptions,
            num_swapped_out=stats.num_swapped_out,
            num_recomputed=stats.num_recomputed,
            swapped_bytes=stats.swapped_bytes,
            num_drafts=stats.spec_decode_num_drafts,
            num_draft_tokens=stats.spec_decode_num_draft_tokens,
            num_accepted_tokens=stats.spec_decode_num_accepted_tokens,
            waiting_by_class=stats.waiting_by_class,
            kv_held_bytes=stats.kv_held_bytes,
            prefix_filter=self._prefix_filter(stats.num_running + stats.num_waiting > 0),
        )

    def _prefix_filter(self, is_working: bool) -> bytes:
        """Not made anew in each of the reports: milliseconds of a full cache."""
        now = time.monotonic()
        if now >= self.filter_due or not is_working:
            self.filter_due = now + FILTER_INTERVAL_S
            self.prefix_filter = self.model.engine.prefix_filter()
        return self.prefix_filter


def _milliseconds(since: float, until: float) -> float:
    return round(1000 * max(until - since, 0.0), 3)


@dataclass
class _Load:
    """A model being loaded by a thread; ``unwanted`` once an Unload has overtaken it."""

    spec: ReplicaSpec
    last: ipc.Progress
    unwanted: bool = False


class Worker:
    """The loop of one worker process."""

    def __init__(self, end: ipc.WorkerEnd, config: ipc.WorkerConfig) -> None:
        self._end = end
        self._config = config
        self._replicas: dict[str, _Replica] = {}
        self._turns = Turns()
        self._kv = SharedPool()
        self._loads: dict[str, _Load] = {}
        self._from_threads: queue.SimpleQueue[_ThreadMessage] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(end.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._stats_due = 0.0
        self._stopping = False
        self._watched: dict[int, _Replica] = {}  # by descriptor that tells of a process's end
        self._exchange = Exchange(config.arena, end.send) if config.arena >= 0 else None
        self._follower: Follower | None = None

    def run(self) -> None:
        """Serve until Shutdown; raises EOFError when the agent is gone."""
        while not self._stopping:
            is_working = self._has_work()
            self._receive(0 if is_working else self._idle_timeout())
            if working := self._working():
                self._step(self._replicas[self._turns.choose(working)])
            self._settle()
            self._report(is_working or bool(working))

    def _has_work(self) -> bool:
        return any(replica.can_step for replica in self._replicas.values())

    def _working(self) -> dict[str, float]:
        """Who could step, with the weight of the most urgent class that waits for it."""
        is_alone = len(self._replicas) == 1
        return {
            name: 1.0 if is_alone else each.model.engine.urgency()
            for name, each in self._replicas.items()
            if each.can_step
        }

    def _idle_timeout(self) -> float | None:
        return LOADING_SIGN_OF_LIFE_S if self._loads else None

    def _settle(self) -> None:
        """Take in requests that the replica's other worker has begun."""
        if self._exchange and self._exchange.is_waiting:
            for replica in self._replicas.values():  # there is one
                self._exchange.settle(replica.model.engine)

    def _receive(self, timeout: float | None) -> None:
        ready = self._poll.poll(None if timeout is None else timeout * 1000)
        for descriptor, _ in ready:
            if descriptor == self._wake:
                self._collect()
            elif replica := self._watched.get(descriptor):
                self._fail(replica, ChildProcessError(replica.model.describe_end()))
            elif descriptor == self._end.fileno():
                for message in self._end.receive():
                    self._handle(message)
            elif self._follower is not None:
                self._follower.obey()  # EOFError, and with it this process's end, without rank 0
        if not ready and timeout:
            for load in self._loads.values():
                self._end.send(load.last)

    def _handle(self, message: ipc.ToWorker) -> None:
        match message:
            case ipc.Add(request=request):
                self._add(request)
            case ipc.Cancel(replica_id=replica_id, request_id=request_id):
                if replica := self._replicas.get(replica_id):
                    self._cancel(replica, request_id)
                if self._exchange:
                    self._exchange.cancel(request_id)
            case ipc.Adopt() if self._exchange:
                self._exchange.adopt(message)
            case ipc.Free(start=start) if self._exchange:
                self._exchange.free(start)
            case ipc.Load(spec=spec):
                self._start_load(spec)
            case ipc.Unload(replica_id=replica_id):
                self._unload(replica_id)
            case ipc.SwapOut(replica_id=replica_id) if replica_id in self._replicas:
                self._swap(self._replicas[replica_id], out=True)
            case ipc.SwapIn(replica_id=replica_id) if replica_id in self._replicas:
                self._swap(self._replicas[replica_id], out=False)
            case ipc.Shutdown():
                self._stopping = True

    # --- generations ------------------------------------------------------------------------
    def _add(self, request: Generate) -> None:
        replica = self._replicas.get(request.replica_id)
        if replica is None:
            self._refuse(request, "replica_not_ready", "the replica is not loaded here")
            return
        try:
            _begin(replica.model.engine, request)
            replica.arrivals[request.request_id] = time.monotonic()
        except RequestRejected as error:
            self._refuse(request, error.code, error.message)
        except Exception as error:  # whatever one request holds, it costs nobody else
            log.exception("request_refused", replica=request.replica_id, request=request.request_id)
            kind = type(error).__name__  # the rest may quote the prompt
            self._refuse(request, "invalid_request", f"The engine could not take it: {kind}.")

    def _refuse(self, request: Generate, code: str, message: str) -> None:
        """Where it stands: one that was to be continued has the tokens that were sent before."""
        num_sent = len(request.sent_token_ids)
        counts = len(request.prompt_token_ids), request.num_cached_tokens, num_sent
        delta = Delta(request.request_id, num_sent, (), "", "error", code, message, *counts)
        self._end.send(ipc.StepOutputs(request.replica_id, [delta]))

    def _cancel(self, replica: _Replica, request_id: str) -> None:
        replica.model.engine.cancel(request_id)
        if replica.is_parked:  # it will not step for a while, and its client waits for the end
            deltas = replica.deltas(replica.model.engine.flush(), time.monotonic())
            if deltas:
                self._end.send(ipc.StepOutputs(replica.replica_id, deltas))

    # --- tiers ------------------------------------------------------------------------------
    def _swap(self, replica: _Replica, out: bool) -> None:
        """Off the device or back onto it, between two steps; what is so already is said again."""
        started = time.monotonic()
        try:
            if replica.is_parked != out:
                self._park(replica) if out else self._unpark(replica)
        except Exception as error:
            self._fail(replica, error)
            return
        tier = "host" if out else "resident"
        stats = replica.model.engine.stats()
        held = stats.weights_bytes + replica.model.workspace_bytes + stats.kv_held_bytes
        seconds = round(time.monotonic() - started, 6)
        self._send_stats()
        self._end.send(ipc.Swapped(replica.replica_id, tier, seconds, held if out else 0))

    def _park(self, replica: _Replica) -> None:
        replica.model.engine.park()
        replica.is_parked = True
        self._turns.leave(replica.replica_id)

    def _unpark(self, replica: _Replica) -> None:
        replica.model.engine.unpark()
        replica.is_parked = False
        self._join(replica)

    def _join(self, replica: _Replica) -> None:
        spec = replica.spec
        self._turns.join(replica.replica_id, spec.guaranteed_percent, spec.priority)

    def _forget(self, replica: _Replica) -> None:
        """Gone with its engine: its turn and its part of the pool are the others'."""
        del self._replicas[replica.replica_id]
        self._turns.leave(replica.replica_id)
        if self._watched.pop(replica.model.pidfd, None):
            self._poll.unregister(replica.model.pidfd)
            os.close(replica.model.pidfd)
        replica.model.close()
        if lease := _lease(replica.model):
            self._kv.leave(lease)

    def _step(self, replica: _Replica) -> None:
        before = replica.busy_seconds
        try:
            deltas = replica.step()
        except Exception as error:
            self._fail(replica, error)
            return
        self._turns.charge(replica.replica_id, replica.busy_seconds - before)
        if deltas:
            self._end.send(ipc.StepOutputs(replica.replica_id, deltas))
        if self._exchange and self._config.role == "prefill":
            self._exchange.hand_over(replica.replica_id, replica.model.engine)

    def _fail(self, replica: _Replica, error: Exception) -> None:
        """Give up one engine and keep the others; a GPU's context is lost as a whole, and so is a
        group."""
        log.error("engine_failed", replica=replica.replica_id, exc_info=error)
        if self._config.device.kind == "cuda" or self._config.group:
            raise error
        self._forget(replica)
        message = f"{type(error).__name__}: {error}"
        self._end.send(ipc.ReplicaFailed(replica.replica_id, "engine_lost", message[:500]))

    def _report(self, working: bool) -> None:
        """Stats five times a second while there is work, and once more when it ends."""
        now = time.monotonic()
        is_over = working and not self._has_work()
        if is_over or (working and now >= self._stats_due):
            self._send_stats()
            self._stats_due = now + STATS_INTERVAL_S

    def _send_stats(self) -> None:
        self._end.send(ipc.Stats([replica.stats() for replica in self._replicas.values()]))

    # --- loading ----------------------------------------------------------------------------
    def _start_load(self, spec: ReplicaSpec) -> None:
        first = ipc.Progress(spec.replica_id, "loading", "start", 0.0)
        load = self._loads[spec.replica_id] = _Load(spec, first)
        args = (load, self._config, self._post)
        threading.Thread(target=_load, args=args, daemon=True, name=spec.replica_id).start()

    def _post(self, message: "_ThreadMessage") -> None:
        """Called by loading threads."""
        self._from_threads.put(message)
        os.eventfd_write(self._wake, 1)

    def _collect(self) -> None:
        os.eventfd_read(self._wake)
        while not self._from_threads.empty():
            message = self._from_threads.get()
            if isinstance(message, ipc.Progress):
                self._loads[message.replica_id].last = message
                self._end.send(message)
            else:
                self._finish_load(message)

    def _finish_load(self, done: "_LoadDone") -> None:
        load = self._loads.pop(done.replica_id)
        if load.unwanted:
            if isinstance(done.result, LoadedModel):
                done.result.close()
            self._end.send(ipc.Unloaded(done.replica_id))
        elif isinstance(done.result, LoadError):
            failure = done.result
            self._end.send(ipc.LoadFailed(done.replica_id, failure.code, failure.message[:500]))
        else:
            replica = _Replica(done.replica_id, done.result, load.spec)
            self._replicas[done.replica_id] = replica
            if lease := _lease(done.result):
                self._kv.join(lease)
            if done.result.pidfd >= 0:
                self._watched[done.result.pidfd] = replica
                self._poll.register(done.result.pidfd, select.POLLIN)
            self._join(replica)
            if follower := done.result.follower:
                self._follower = follower
                self._poll.register(follower.line.fileno(), select.POLLIN)
            self._end.send(_loaded(done.replica_id, done.result, done.seconds))
            self._send_stats()

    def _unload(self, replica_id: str) -> None:
        if replica_id in self._loads:
            self._loads[replica_id].unwanted = True  # it ends where it next tells its progress
        else:
            if replica := self._replicas.get(replica_id):
                self._forget(replica)
            self._end.send(ipc.Unloaded(replica_id))


@dataclass(frozen=True)
class _LoadDone:
    replica_id: str
    result: LoadedModel | LoadError
    seconds: float


_ThreadMessage = ipc.Progress | _LoadDone


def _load(load: _Load, config: ipc.WorkerConfig, post: Callable[[_ThreadMessage], None]) -> None:
    """Body of a loading thread: always posts exactly one _LoadDone."""
    started, spec = time.monotonic(), load.spec

    def progress(state: str, stage: str, fraction: float) -> None:
        if load.unwanted:  # a thread cannot be stopped, but it can be told
            raise LoadError("unwanted", "the replica is not wanted any more")
        post(ipc.Progress(spec.replica_id, state, stage, fraction))

    result: LoadedModel | LoadError
    try:
        result = open_model(spec, config, progress)
    except LoadError as error:
        result = error
    except MemoryError as error:
        result = LoadError("out_of_memory", str(error) or "the machine has no memory left")
    except Exception as error:
        log.exception("load_failed", replica=spec.replica_id)
        result = LoadError("load_failed", f"{type(error).__name__}: {error}")
    post(_LoadDone(spec.replica_id, result, time.monotonic() - started))


def open_model(spec: ReplicaSpec, config: ipc.WorkerConfig, progress: Progress) -> LoadedModel:
    """Load a replica with the backend its source and engine name; raises LoadError."""
    if spec.source.startswith("simulated://"):
        from gpuagent.agent.backends import simulated, simulated_embedding

        if spec.task == "embed":
            return simulated_embedding.load(spec, progress)
        return simulated.load_simulated(spec, progress, config.role)
    if spec.engine == "vllm":
        from gpuagent.agent.backends.vllm import load_vllm

        return load_vllm(spec, config, progress)
    from gpuagent.agent.backends.torch import load_torch  # seconds of import: only where needed

    return load_torch(spec, config, progress)


def _loaded(replica_id: str, model: LoadedModel, seconds: float) -> ipc.Loaded:
    stats = model.engine.stats()
    return ipc.Loaded(
        replica_id=replica_id,
        weights_bytes=stats.weights_bytes,
        kv_bytes=stats.kv_bytes,
        peak_bytes=model.peak_bytes,
        load_seconds=round(seconds, 3),
        sha256=model.sha256,
        max_model_len=model.max_model_len,
        bundle=model.bundle,
        warning_code=model.warning[0],
        warning=model.warning[1],
        workspace_bytes=model.workspace_bytes,
    )


def _begin(engine: Engine, request: Generate) -> None:
    """Queue it, from where another replica left off if one began it; raises RequestRejected."""
    asked, sent = to_engine(request), request.sent_token_ids
    if not sent:
        engine.add(asked)
        return
    seed = asked.sampling.seed
    seed = secrets.randbits(64) if seed is None else seed  # of the rest; any will do
    engine.adopt(asked, HandOver(sent, seed, 0, request.num_cached_tokens), None)


def _lease(model: LoadedModel) -> Lease | None:
    """Its part of the worker's KV pool; None if it has a pool of its own."""
    return getattr(model.engine, "lease", None)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the agent ends; it may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(arguments: list[str]) -> None:
    """Entry point: ``FD PARENT_PID CONFIG`` where CONFIG is a WorkerConfig as JSON."""
    _die_with_parent(int(arguments[1]))
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the agent's to handle
    connection = socket.socket(fileno=int(arguments[0]))
    config = msgspec.json.decode(arguments[2], type=ipc.WorkerConfig)
    os.environ |= {"OMP_NUM_THREADS": str(config.threads), "TOKENIZERS_PARALLELISM": "false"}
    with suppress(EOFError, ConnectionError):  # the agent is gone
        Worker(ipc.WorkerEnd(connection), config).run()
    sys.stderr.flush()
    os._exit(0)  # loading threads may be deep in a download


if __name__ == "__main__":
    main(sys.argv[1:])
