"""The small parts: settings, devices, frames between processes, the simulated model."""

import asyncio
import socket
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpuagent.agent import devices, ipc, telemetry
from gpuagent.agent.backends.base import LoadError
from gpuagent.agent.backends.simulated import SimulatedEngine, load_simulated, parse_params
from gpuagent.agent.config import AgentSettings, read_settings
from gpuagent.agent.devices import DeviceError, find_devices, parse_share
from gpuagent.agent.http import HttpServer
from gpuagent.agent.metrics import Histogram
from gpuagent.engine.request import GenerationRequest, RequestOutput, SamplingParams
from gpuagent.wire.messages import Delta, Device
from tests.agent.harness import GIB, spec


# --- settings and devices -----------------------------------------------------------------------
def test_options_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_AGENT_ZONE", "from-env")
    monkeypatch.setenv("ENGINE_AGENT_NODE_ID", "n9")
    settings = read_settings(["--node-id", "n1", "--file-roots", "/srv"])
    assert (settings.node_id, settings.zone) == ("n1", "from-env")
    assert settings.allowed_file_roots() == (Path("/srv").resolve(),)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--node-id", "a.b"],
        ["--node-id", "*"],
        ["--node-id", "Über"],
        ["--node-id", "n", "--no-such-option", "1"],
        ["--node-id", "n", "--threads", "-1"],
    ],
)
def test_bad_options_end_with_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A node's name is one subject token, or it could speak for another node."""
    with pytest.raises(SystemExit) as ended:
        read_settings(arguments)
    usage, mistake = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and usage.startswith("usage")
    assert mistake.startswith("gpuagent: error: ") and "pydantic" not in mistake


def test_a_missing_name_and_a_missing_file_are_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, said in (
        ([], "--node-id (or ENGINE_AGENT_NODE_ID): is required"),
        (["--node-id", "n", "--creds", str(tmp_path / "x.creds")], "there is no file"),
        (["--node-id", "n", "--creds", str(tmp_path)], "there is no file"),
    ):
        with pytest.raises(SystemExit) as ended:
            read_settings(arguments)
        assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_cpu_shares_become_devices() -> None:
    devices = find_devices("cpu:1GiB,cpu:512MiB")
    assert [(d.index, d.kind, d.memory_bytes) for d in devices] == [
        (0, "cpu", GIB),
        (1, "cpu", GIB // 2),
    ]


@pytest.mark.parametrize(
    "text", ["", "gpu", "cpu:", "cpu:1XB", "cpu:0", "cpu:1000000GiB", "cpu:-1"]
)
def test_a_device_list_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(DeviceError):
        find_devices(text)


def test_agents_that_divide_a_machine_promise_no_byte_or_core_twice() -> None:
    """Device, host memory and room for weights of three together are at most the machine's."""
    total = psutil.virtual_memory().total
    parts = [AgentSettings(node_id="n1", share=f"{number}/3") for number in (1, 2, 3)]
    found = [find_devices("auto", part.part()) for part in parts]
    assert [one.memory_bytes for (one,) in found if one.kind == "cpu"] == [total // 3] * 3
    assert [part.machine_bytes() for part in parts] == [total // 3] * 3
    assert sum(part.host_bytes() for part in parts) <= total // 4


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each to one agent, under its own index; an agent for whom none is left has the CPU."""
    gpus = tuple(Device(index=i, kind="cuda", name="H200", memory_bytes=GIB) for i in range(3))
    monkeypatch.setattr(devices, "_gpus", lambda: gpus)
    dealt = [[d.index for d in find_devices("auto", parse_share(f"{n}/2"))] for n in (1, 2)]
    assert dealt == [[0, 2], [1]]
    assert [one.kind for one in find_devices("auto", parse_share("4/4"))] == ["cpu"]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b"])
def test_a_share_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="share"):
        AgentSettings(node_id="n1", share=text)


# --- frames between agent and worker ------------------------------------------------------------
texts = st.text(max_size=20)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5), st.integers(1, 50))
def test_frames_survive_any_split(pairs: list[tuple[str, str]], size: int) -> None:
    """A stream socket keeps no borders between messages."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = ipc.WorkerEnd(theirs)
        sent = [ipc.Cancel(replica_id, request_id) for replica_id, request_id in pairs]
        data = b"".join(ipc.frame(message) for message in sent)
        received: list[ipc.ToWorker] = []
        for start in range(0, len(data), size):
            ours.sendall(data[start : start + size])
            received.extend(end.receive())
        assert received == sent


@pytest.mark.parametrize(
    "junk", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x02\x91\x01"]
)
def test_junk_between_processes_is_a_typed_error(junk: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(junk)
        with pytest.raises(ipc.ProtocolError):
            list(ipc.WorkerEnd(theirs).receive())


def test_every_message_from_a_worker_keeps_its_type() -> None:
    decoder = msgspec.msgpack.Decoder(ipc.FromWorker)
    messages = [
        ipc.StepOutputs("r", [Delta("a", 0, (1,), "x")]),
        ipc.LoadFailed("r", "code", "text"),
        ipc.Stats([ipc.ReplicaStats("r", num_running=3)]),
        ipc.Progress("r", "downloading", "download", 0.5),
    ]
    assert [decoder.decode(ipc.frame(m)[4:]) for m in messages] == messages


# --- the simulated model ------------------------------------------------------------------------
def engine(source: str = "simulated://m?step_ms=0", **fields: object) -> SimulatedEngine:
    model = load_simulated(spec(source=source, **fields), lambda *_: None)
    assert isinstance(model.engine, SimulatedEngine)
    return model.engine


def run(
    engine: SimulatedEngine, prompt: tuple[int, ...], **sampling: object
) -> list[RequestOutput]:
    params = SamplingParams(**{"max_tokens": 20, **sampling})  # type: ignore[arg-type]
    engine.add(GenerationRequest("a", prompt, params))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_the_same_prompt_gives_the_same_words_and_another_others() -> None:
    first, again = run(engine(), (1, 2, 3)), run(engine(), (1, 2, 3))
    assert token_ids(first) == token_ids(again) != token_ids(run(engine(), (1, 2, 4)))
    assert [o.index for o in first] == list(range(20)) and first[-1].finish_reason == "length"


def test_its_tokenizer_spells_what_the_engine_says() -> None:
    model = load_simulated(spec(source="simulated://m?step_ms=0&vocab=500"), lambda *_: None)
    tokenizer = Tokenizer.from_str(model.bundle.tokenizer_json.decode())
    for text in ("hello", "<|im_start|>user\nÄ 漢\n<|im_end|>", "tok17 "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    prompt = tuple(tokenizer.encode("hi").ids)
    assert isinstance(model.engine, SimulatedEngine)
    outputs = run(model.engine, prompt)
    assert tokenizer.decode(token_ids(outputs)) == "".join(o.text for o in outputs)
    assert tokenizer.get_vocab_size() == model.bundle.vocab_size == 500


def test_stop_strings_cut_the_text_and_nothing_of_them_is_shown() -> None:
    """Also when one begins in one word and ends in the next."""
    words = "".join(o.text for o in run(engine(), (7,))).split(" ")
    stop = f"{words[3][-2:]} {words[4][:4]}"
    outputs = run(engine(), (7,), stop=(stop,))
    text = "".join(o.text for o in outputs)
    whole = " ".join(words)
    assert text == whole[: whole.index(stop)] and outputs[-1].finish_reason == "stop"


def test_the_end_token_is_neither_delivered_nor_counted() -> None:
    stopping = "simulated://m?step_ms=0&stop_after=5"
    outputs = run(engine(stopping), (1,))
    assert (outputs[-1].finish_reason, outputs[-1].num_output_tokens) == ("stop", 5)
    assert len(token_ids(outputs)) == 5
    assert len(token_ids(run(engine(stopping), (1,), ignore_eos=True))) == 20
    third = token_ids(run(engine(), (1,)))[2]
    outputs = run(engine(), (1,), stop_token_ids=(third,))
    assert (len(token_ids(outputs)), outputs[-1].finish_reason) == (2, "stop")


@pytest.mark.parametrize(
    "query", ["step_ms=x", "speed=1", "vocab=10", "prefill_tps=0", "step_ms=-1", "step_ms=1e9"]
)
def test_unknown_or_impossible_parameters_are_refused(query: str) -> None:
    with pytest.raises(LoadError) as refused:
        parse_params(f"simulated://m?{query}")
    assert refused.value.code == "source_invalid"


# --- metrics and HTTP ---------------------------------------------------------------------------
def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 3.0):
        histogram.observe(seconds)
    histogram.observe(0.4, times=4)
    assert histogram.cumulative() == [("0.1", 6.0), ("1.0", 7.0), ("+Inf", 8.0)]
    assert histogram.total == pytest.approx(4.05)


async def test_the_port_answers_only_what_it_knows() -> None:

    server = HttpServer({"/livez": lambda: (200, "text/plain", b"ok")})
    port = await server.start("127.0.0.1", 0)
    assert await asyncio.to_thread(_get, port, "/livez?verbose=1") == "200 ok"
    assert (await asyncio.to_thread(_raw, port, b"GET /secret HTTP/1.1\r\n\r\n"))[9:12] == b"404"
    assert (await asyncio.to_thread(_raw, port, b"POST /livez HTTP/1.1\r\n\r\n"))[9:12] == b"400"
    assert await asyncio.to_thread(_raw, port, b"GET /" + b"x" * 20_000) == b""
    server.close()


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
        return f"{response.status} {response.read().decode()}"


def _raw(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(data)
        try:
            return connection.recv(4096)
        except ConnectionResetError:
            return b""


def test_what_the_machine_could_not_give_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of 4 GiB, 1 GiB of ours and 2 GiB available: 3 can be reached, 1 is foreign."""
    devices = find_devices("cpu:4GiB,cpu:2GiB")
    memory = SimpleNamespace(available=2 * GIB)
    monkeypatch.setattr(telemetry.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(telemetry, "resident_bytes", lambda pid: GIB // 2)
    assert telemetry.foreign_bytes(devices, {0: [1], 1: [2]}) == {0: GIB, 1: 0}


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 XiB", "1e9"])
def test_a_size_that_is_none_is_refused_with_the_fields_name(text: str) -> None:
    with pytest.raises(ValueError, match="host_memory"):
        AgentSettings(node_id="n1", host_memory=text)
    assert AgentSettings(node_id="n1", host_memory="1.5GiB").host_bytes() == 3 * GIB // 2
    assert AgentSettings(node_id="n1").reserved_bytes("cuda") == 2 * GIB
    assert AgentSettings(node_id="n1").reserved_bytes("cpu") == 0
