"""The engine that is vLLM's server: real processes, and a server that speaks its protocol."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuagent.agent.backends import vllm
from gpuagent.agent.backends.base import LoadedModel, LoadError
from gpuagent.agent.backends.vllm_figures import Figures, read_figures
from gpuagent.agent.backends.vllm_server import failure_reason
from gpuagent.agent.backends.vllm_stream import Stream
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.engine.request import (
    GenerationRequest,
    HandOver,
    LatencyClass,
    RequestOutput,
    RequestRejected,
    SamplingParams,
)
from gpuagent.wire.messages import Device, ReplicaStatus, Sampling
from tests.agent import protocol_server
from tests.agent.conftest import StartAgent
from tests.agent.harness import GIB, Control, eventually, spec
from tests.agent.protocol_server import EOS, next_token
from tests.engine.tiny_model import tiny_model

PROMPT = (10, 20, 30)
Load = Callable[..., LoadedModel]


@pytest.fixture(scope="session")
def server_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is called as the Python of vLLM's environment would be, and runs the other server."""
    path = tmp_path_factory.mktemp("vllm") / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {protocol_server.__file__} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def load(server_python: Path) -> Iterator[Load]:
    loaded: list[LoadedModel] = []

    def start(behaviour: str = "ok", start_s: float = 20.0, stall_s: float = 30.0) -> LoadedModel:
        config = WorkerConfig(
            Device(index=0, kind="cpu", name="cpu", memory_bytes=GIB),
            threads=1,
            model_cache="",
            file_roots=(str(tiny_model().parent),),
            vllm_python=str(server_python),
            vllm_options=("--behaviour", behaviour),
            start_seconds=start_s,
            stall_seconds=stall_s,
        )
        loaded.append(vllm.load_vllm(_spec(), config, lambda *_: None))
        return loaded[-1]

    yield start
    for model in loaded:
        model.close()


def _spec(**fields: object):
    values = {"source": f"file://{tiny_model()}", "max_model_len": 128, "engine": "vllm", **fields}
    return spec(**values)


def _request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    return GenerationRequest(name, prompt, params)


def _drive(model: LoadedModel, seconds: float = 20.0) -> list[RequestOutput]:
    """Step until there is nothing left to do."""
    outputs, give_up = [], time.monotonic() + seconds
    while model.engine.has_work():
        assert time.monotonic() < give_up, outputs
        outputs += model.engine.step()
    return outputs


def _expected(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (token := next_token(tokens)) != EOS:
        tokens.append(token)
    return tokens[len(prompt) :]


def _whole(outputs: list[RequestOutput], start: int = 0) -> tuple[list[int], str, RequestOutput]:
    """Tokens, text and last output of one request; each output begins where the last one ended."""
    tokens: list[int] = []
    for output in outputs:
        assert output.index == start + len(tokens)
        tokens += output.token_ids
        assert output.num_output_tokens == start + len(tokens)
    assert [one.finish_reason for one in outputs[:-1]] == [None] * (len(outputs) - 1)
    return tokens, "".join(one.text for one in outputs), outputs[-1]


# --- what a generation is -------------------------------------------------------------------
def test_tokens_text_and_counts_are_those_of_the_stream(load: Load) -> None:
    """As of every engine: exact indices, one end, and the child's own count of cached tokens."""
    model = load()
    model.engine.add(_request())
    tokens, text, last = _whole(_drive(model))
    assert tokens == _expected(PROMPT, 8) and len(tokens) == 8
    assert text == "".join(chr(token + 33) for token in tokens)
    counts = last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens
    assert (last.finish_reason, *counts) == ("length", 3, 2, 8)
    stats = model.engine.stats()
    assert (stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_cached_tokens) == (3, 7, 2)
    assert (stats.num_running, stats.num_free_blocks, stats.block_size) == (0, 64, 128)


def test_a_stop_token_is_neither_delivered_nor_counted(load: Load) -> None:
    """The model's own end, and one that the request names; ``ignore_eos`` takes the first away."""
    model = load()
    ending = (*PROMPT, ord("z") - 33)
    model.engine.add(_request(prompt=ending))
    assert _whole(_drive(model))[0] == []
    model.engine.add(_request(prompt=ending, ignore_eos=True, max_tokens=2))
    tokens, _, last = _whole(_drive(model))
    assert tokens[0] == EOS and last.finish_reason == "length"
    third = _expected(PROMPT, 3)[2]
    model.engine.add(_request(stop_token_ids=(third,)))
    tokens, _, last = _whole(_drive(model))
    assert (tokens, last.finish_reason) == (_expected(PROMPT, 2), "stop")


def test_a_stop_string_is_counted_and_cut_from_the_text(load: Load) -> None:
    """It ends the stream from this side as soon as it is complete, whatever the child does."""
    model = load("slow")
    text = "".join(chr(token + 33) for token in _expected(PROMPT, 8))
    model.engine.add(_request(stop=(text[2:4],), max_tokens=100))
    tokens, said, last = _whole(_drive(model))
    assert (len(tokens), said, last.finish_reason) == (4, text[:2], "stop")


def test_a_generation_goes_on_from_what_another_replica_sent(load: Load) -> None:
    """The same tokens as uncut, counted from the cut; a stop string may begin before it."""
    model = load()
    whole = _expected(PROMPT, 8)
    text = "".join(chr(token + 33) for token in whole)
    model.engine.adopt(_request(), HandOver(tuple(whole[:3]), 1, 0, 1), None)
    tokens, said, last = _whole(_drive(model), start=3)
    assert (tokens, said, last.finish_reason) == (whole[3:], text[3:], "length")
    assert (last.num_output_tokens, last.num_cached_tokens) == (8, 1)  # of the first replica's
    model.engine.adopt(_request(stop=(text[2:4],)), HandOver(tuple(whole[:3]), 1, 0), None)
    tokens, said, last = _whole(_drive(model), start=3)
    assert (tokens, said, last.finish_reason) == (whole[3:4], "", "stop")
    model.engine.adopt(_request(), HandOver(tuple(whole), 1, 0), None)
    (last,) = _drive(model)
    assert (last.index, last.token_ids, last.finish_reason) == (8, (), "length")


def test_log_probabilities_name_the_best_alternatives(load: Load) -> None:
    """vLLM adds the chosen token to those asked for; two were asked for."""
    model = load()
    model.engine.add(_request(max_tokens=1, logprobs=2))
    (output,) = _drive(model)
    (entry,) = output.logprobs
    token = _expected(PROMPT, 1)[0]
    assert (entry.token_id, entry.token, entry.logprob) == (token, chr(token + 33), -0.5)
    assert [row[0] for row in entry.top] == [token, token + 1]


def test_every_parameter_is_in_the_order(load: Load) -> None:
    """Each under vLLM's name, the class as a priority, and the tenant's salt."""
    sampling = dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=-1, stop=("x",),
                    presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1,
                    logit_bias=((4, 2.5),), logprobs=3, stop_token_ids=(9,))  # fmt: skip
    params = SamplingParams(max_tokens=8, **sampling)
    request = GenerationRequest("r", PROMPT, params, LatencyClass.BATCH, b"salt")
    body = Stream(request, None, frozenset({9, EOS}), 8).body((7,))
    same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
    assert {name: body[name] for name in same} == {name: sampling[name] for name in same}
    assert (body["prompt"], body["max_tokens"], body["logprobs"]) == ([10, 20, 30, 7], 7, 3)
    assert (body["stop"], body["stop_token_ids"], body["ignore_eos"]) == (["x"], [9, EOS], True)
    assert (body["logit_bias"], body["repetition_penalty"]) == ({"4": 2.5}, 1.1)
    assert (body["seed"], body["priority"], body["cache_salt"]) == (2**63 - 1, 2, "c2FsdA==")


@pytest.mark.parametrize(
    ("sampling", "sent", "code"),
    [
        ({"temperature": -1.0}, (), "invalid_sampling"),
        ({"logit_bias": ((4, 101.0),)}, (), "invalid_sampling"),
        ({"stop_token_ids": (5_000,)}, (), "invalid_token_id"),
        ({"presence_penalty": 0.5}, (7,), "continuation_unsupported"),
        ({"frequency_penalty": 0.5}, (7,), "continuation_unsupported"),
    ],
)
def test_what_it_cannot_do_is_refused(load: Load, sampling, sent, code: str) -> None:
    model = load()
    with pytest.raises(RequestRejected) as refused:
        if sent:
            model.engine.adopt(_request(**sampling), HandOver(sent, 1, 0), None)
        else:
            model.engine.add(_request(**sampling))
    assert refused.value.code == code and not model.engine.has_work()


def test_a_closed_stream_frees_what_it_held(load: Load) -> None:
    """The cancellation is reported at once, and the child knows of it within a second."""
    model = load("slow")
    model.engine.add(_request(max_tokens=100))
    while not model.engine.step():
        pass
    model.engine.cancel("r")
    (last,) = _drive(model, 1.0)
    assert (last.finish_reason, last.num_output_tokens) == ("cancelled", 1)
    figures: list[Figures] = []
    give_up = time.monotonic() + 1.0
    while not figures or 'num_requests_running{engine="0"} 0' not in figures[-1].told:
        assert time.monotonic() < give_up, figures[-1:]
        model.engine.client.get("/metrics", lambda _, text: figures.append(read_figures(text)))
        time.sleep(0.05)


# --- what can go wrong ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("behaviour", "code", "num_tokens"),
    [
        ("drop", "engine_lost", 2),
        ("error", "engine_lost", 0),
        ("garbage", "stream_corrupt", 1),
        ("nonsense", "stream_corrupt", 0),  # a token that there is not
        ("aborts", "stream_corrupt", 0),
        ("miscount", "stream_corrupt", 7),  # the last one waited for the count
    ],
)
def test_a_broken_stream_ends_with_its_error(
    load: Load, behaviour: str, code: str, num_tokens: int
) -> None:
    model = load(behaviour)
    model.engine.add(_request())
    tokens, _, last = _whole(_drive(model))
    assert (last.finish_reason, last.error_code, len(tokens)) == ("error", code, num_tokens)
    assert "prompt" not in last.error_type and not model.engine.has_work()


def test_a_refusal_of_its_own_names_the_parameter_only(load: Load) -> None:
    model = load()
    model.engine.add(_request(temperature=3.0))
    (last,) = _drive(model)
    assert (last.error_code, last.error_type) == (
        "invalid_request",
        "vLLM refused the request (temperature): BadRequestError",
    )


def test_one_that_shows_no_sign_of_work_is_lost(load: Load) -> None:
    model = load("silent", stall_s=0.8)
    model.engine.add(_request())
    with pytest.raises(vllm.EngineLost, match=r"no sign of work for 0\.8 s"):
        _drive(model, 10.0)


def test_a_start_that_fails_says_why(load: Load, tmp_path: Path) -> None:
    """By the first exception, not the one that only says that something has failed."""
    with pytest.raises(LoadError) as failed:
        load("fails")
    assert failed.value.code == "engine_start_failed"
    assert failed.value.message == "vLLM exited with code 1: ValueError: no such model"
    with pytest.raises(LoadError) as late:
        load("mute", start_s=1.0)
    assert late.value.code == "engine_start_timeout"


def test_without_an_environment_the_engine_is_unavailable(server_python: Path) -> None:
    def load_with(python: str) -> str:
        config = WorkerConfig(Device(index=0, kind="cpu", name="c", memory_bytes=GIB), 1, "",
                              (str(tiny_model().parent),), vllm_python=python)  # fmt: skip
        with pytest.raises(LoadError) as failed:
            vllm.load_vllm(_spec(), config, lambda *_: None)
        return failed.value.code

    assert load_with("") == load_with("/nowhere/bin/python") == "engine_unavailable"
    assert load_with(sys.executable) == "engine_unavailable"  # a Python that has no vLLM


def test_a_last_line_is_better_than_nothing() -> None:
    assert failure_reason(["", "Killed", ""]) == "Killed"
    assert failure_reason([]) == "it said nothing"


def test_the_key_is_on_no_command_line(load: Load) -> None:
    model = load()
    key = model.engine.client._key
    children = psutil.Process().children(recursive=True)
    assert len(children) >= 2 and key
    assert not any(key in word for child in children for word in child.cmdline())


def test_nothing_outlives_a_starter_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL of whoever holds the pipe ends the command, its children in other groups too, and
    removes its folder."""
    folder, pids = tmp_path / "f", tmp_path / "pids"
    folder.mkdir()
    from gpuagent.agent import leash

    inner = f"setsid sleep 300 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"
    code = (
        "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE,"
        " start_new_session=True); time.sleep(300)"
    )
    command = [sys.executable, "-I", leash.__file__, str(folder), "sh", "-c", inner]
    starter = subprocess.Popen([sys.executable, "-c", code, *command])
    give_up = time.monotonic() + 20
    while not pids.exists():
        assert time.monotonic() < give_up
        time.sleep(0.02)
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2 and all(psutil.pid_exists(pid) for pid in started)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    while folder.exists() or any(map(psutil.pid_exists, started)):
        assert time.monotonic() < give_up
        time.sleep(0.02)


# --- under an agent -------------------------------------------------------------------------
async def test_a_child_that_dies_is_replaced_and_its_streams_end(
    plane: Control, start_agent: StartAgent, server_python: Path
) -> None:
    """Placed, loaded, streamed and counted like every other; its death is noticed, idle or busy,
    and no process is left once the agent is killed."""
    options = ("--vllm-python", str(server_python), "--vllm-options=--behaviour slow")
    roots = ("--file-roots", str(tiny_model().parent))
    agent = start_agent("n1", *options, *roots)
    await plane.place("n1", _spec())
    status = await plane.replica("n1", "ready")
    assert status.max_model_len == 128 and status.kv_bytes > 0
    assert (await plane.observed("n1")).engines == ("builtin", "vllm")

    ok = await plane.generate("n1", prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=3))
    last = await plane.terminal(ok, 20)
    assert (last.finish_reason, last.num_output_tokens) == ("length", 3)
    assert list(plane.assert_contiguous(ok)) == _expected(PROMPT, 3)

    doomed = await plane.generate("n1", prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=99))
    await eventually(lambda: plane.deltas(doomed))
    _kill_server(agent.pid)
    last = await plane.terminal(doomed, 10)
    assert (last.finish_reason, last.error_code) == ("error", "engine_lost")
    status = await _ready_again(plane, status.since)

    _kill_server(agent.pid)  # idle now
    await _ready_again(plane, status.since)
    assert "vLLM was ended by signal 9" in agent.log
    family = psutil.Process(agent.pid).children(recursive=True)
    assert len(family) >= 3
    agent.process.kill()
    await eventually(lambda: not any(process.is_running() for process in family), 5.0)


async def _ready_again(plane: Control, before: float) -> ReplicaStatus:
    """Its state once it has become ready at another time than ``before``."""
    while (status := await plane.replica("n1", "ready")).since == before:
        await asyncio.sleep(0.05)
    return status


def _kill_server(agent_pid: int) -> None:
    family = psutil.Process(agent_pid).children(recursive=True)
    servers = [one for one in family if protocol_server.__file__ in one.cmdline()
               and "-I" not in one.cmdline()]  # fmt: skip
    assert len(servers) == 1, [one.cmdline() for one in family]
    os.kill(servers[0].pid, signal.SIGKILL)


async def test_an_agent_without_it_says_so(plane: Control, start_agent: StartAgent) -> None:
    """No such engine in what it offers; a replica that is placed there all the same fails typed."""
    start_agent("n1", "--file-roots", str(tiny_model().parent))
    await plane.place("n1", _spec())
    status = await plane.replica("n1", "failed")
    assert status.reason_code == "engine_unavailable"
    observed = await plane.observed("n1")
    assert observed.engines == ("builtin",)
