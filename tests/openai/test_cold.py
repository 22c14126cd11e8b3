"""A model that no node has loaded, asked for over each surface; the test places it meanwhile."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import openai
import pytest

from controlplane.domain import model
from tests.openai.conftest import FAST, VECTORS
from tests.openai.ledger import record_of, requests_of
from tests.openai.stack import Stack, until
from tests.openai.test_websocket import Client, open_socket
from tests.openai.wire import HELLO

_numbers = iter(range(1000))


@pytest.fixture
def asleep(stack: Stack) -> str:
    """The name of a model that is registered and placed nowhere; its tokenizer is unknown."""
    name = f"asleep-{next(_numbers)}"
    stack.add_version(name, FAST)
    time.sleep(0.2)  # the gateway follows the log every 50 ms
    return name


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def stream(stack: Stack, key: str, model: str, first: threading.Event) -> list[str]:
    """The lines of a stream; ``first`` is set with the first one."""
    body = {"model": model, "messages": HELLO, "max_tokens": 3, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{stack.gateway.url}/v1/chat/completions"
    lines = []
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20, trust_env=False) as one:
        assert one.status_code == 200, one.read()
        for line in one.iter_lines():
            lines.append(line)
            first.set()
    return [one.headers["x-engine-request-id"], *filter(None, lines)]


def test_a_stream_says_its_place_and_the_wait_and_is_answered(
    stack: Stack, key: str, asleep: str, pool: ThreadPoolExecutor
) -> None:
    first = threading.Event()
    streaming = pool.submit(stream, stack, key, asleep, first)
    assert first.wait(5), "the first comment comes at once"
    stack.place(asleep, FAST, "n1")
    request_id, *lines = streaming.result(20)
    assert lines[0].startswith(
        ": waiting reason=model_loading position=1 expected=6s class=standard"
    )
    assert lines[-1] == "data: [DONE]" and '"completion_tokens":3' in lines[-2]
    record = record_of(stack, request_id)
    assert (record["outcome"], record["num_output_tokens"], record["attempts"]) == ("ok", 3, 1)
    assert 0 < record["num_prompt_tokens"] < FAST.max_prompt_tokens


def test_inputs_wait_for_a_model_whose_tokenizer_nobody_knows(
    client: openai.OpenAI, stack: Stack, pool: ThreadPoolExecutor
) -> None:
    """Reserved is the most that they may become, billed is what they were; one that turns out too
    long is refused then, and costs nothing."""
    name = f"asleep-{next(_numbers)}"
    stack.add_version(name, VECTORS)
    time.sleep(0.2)
    texts = [f"text {number}" for number in range(40)]

    def ask(given: list[str]) -> Any:
        return client.embeddings.with_raw_response.create(model=name, input=given)

    asked, too_long = pool.submit(ask, texts), pool.submit(ask, ["x" * 65])
    until(lambda: len(_asked_for(stack, name)) == 2, 5)
    assert {row["reserved_tokens"] for row in _asked_for(stack, name)} == {40 * 64, 64}
    stack.place(name, VECTORS, "n1")
    raw = asked.result(20)
    assert [one.index for one in raw.parse().data] == list(range(40))
    record = record_of(stack, raw.headers["x-engine-request-id"])
    assert (record["outcome"], record["num_prompt_tokens"]) == ("ok", sum(map(len, texts)))
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
        too_long.result(20)


def _asked_for(stack: Stack, name: str) -> list[dict[str, Any]]:
    return [row for row in requests_of(stack, "acme") if row["version_id"] == f"{name}@v1"]


def test_many_requests_for_one_cold_model_are_all_answered(
    client: openai.OpenAI, stack: Stack, asleep: str, pool: ThreadPoolExecutor
) -> None:
    def ask(text: str) -> Any:
        return client.completions.create(model=asleep, prompt=text, max_tokens=2)

    asking: list[Future[Any]] = [pool.submit(ask, f"hello {i}") for i in range(6)]
    time.sleep(0.3)
    stack.place(asleep, FAST, "n1")
    assert [one.result(20).usage.completion_tokens for one in asking] == [2] * 6


def test_what_no_device_can_hold_is_told_so_by_the_first_answer(
    client: openai.OpenAI, stack: Stack
) -> None:
    stack.add_version("vast", msgspec.structs.replace(FAST, gpu_memory=1 << 45, min_replicas=0))
    time.sleep(0.2)
    with pytest.raises(openai.InternalServerError, match="too small even when empty") as refused:
        client.with_options(max_retries=0).completions.create(model="vast", prompt="a")
    assert (refused.value.status_code, refused.value.code) == (503, "model_not_ready")


def test_who_waits_for_a_version_that_is_retired_is_told_that_there_is_none(
    client: openai.OpenAI, stack: Stack, asleep: str, pool: ThreadPoolExecutor
) -> None:
    asking = pool.submit(client.completions.create, model=asleep, prompt="a", timeout=30)
    time.sleep(0.3)
    assert not asking.done()
    began = time.monotonic()
    stack.order(model.DECIDER, f"model-{asleep}", model.RetireVersion(asleep, "v1", time.time()))
    with pytest.raises(openai.NotFoundError, match=f"'{asleep}@v1' does not exist"):
        asking.result(20)
    assert time.monotonic() - began < 5, "not the 60 s of its class"


def test_the_websocket_says_that_it_waits_and_then_starts(
    stack: Stack, key: str, asleep: str
) -> None:
    with open_socket(stack, {"Authorization": f"Bearer {key}"}) as socket:
        ws = Client(socket)
        assert ws.receive()["type"] == "ready"
        ws.generate("a", asleep)
        ws.generate("b", asleep)
        waiting = [ws.receive(), ws.receive()]
        assert [(one["type"], one["reason"]) for one in waiting] == [
            ("waiting", "model_loading")
        ] * 2
        assert sorted(one["position"] for one in waiting) == [1, 2]
        ws.send(type="cancel", id="b")
        ended = ws.until_end("b")["b"]
        assert ended[-1]["finish_reason"] == "cancelled"
        assert ended[-1]["usage"]["completion_tokens"] == 0
        stack.place(asleep, FAST, "n1")
        messages = [one for one in ws.until_end("a")["a"] if one["type"] != "waiting"]
        assert messages[0]["type"] == "started" and messages[0]["node"] == "n1"
        assert messages[-1]["usage"]["completion_tokens"] == 5


def test_a_client_that_leaves_while_held_is_on_record_with_nothing(
    stack: Stack, key: str, asleep: str
) -> None:
    url = f"{stack.gateway.url}/v1/chat/completions"
    body = {"model": asleep, "messages": HELLO, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=9, trust_env=False) as one:
        assert next(one.iter_lines()).startswith(": waiting reason=model_loading")
        request_id = one.headers["x-engine-request-id"]
    until(lambda: record_of(stack, request_id)["outcome"], 5)
    record = record_of(stack, request_id)
    counts = (record["num_prompt_tokens"], record["num_output_tokens"])
    assert (record["outcome"], counts) == ("cancelled", (0, 0))
