"""``/v1/embeddings``: what clients get, what is refused, and what the ledger says of it."""

import asyncio
import json
import math
import socket
import time
from array import array
from base64 import b64decode
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from controlplane.application.inference import Target
from controlplane.application.refused import Refused
from controlplane.domain import model
from controlplane.domain.money import Price
from controlplane.entrypoints.openai.embeddings import (
    INPUTS_AT_ONCE,
    TOKENS_AT_ONCE,
    dealt,
    shortened,
)
from controlplane.entrypoints.openai.encoding import Encoder
from gpuagent.agent.backends.simulated import SimulatedParams, make_bundle
from gpuagent.agent.backends.simulated_embedding import vector
from gpuagent.agent.inference import MAX_INPUTS
from tests.agent.harness import spec
from tests.engine.tiny_encoder import VOCAB, word_pieces
from tests.openai.ledger import attempts_of, record_of, requests_of, usage_of
from tests.openai.stack import Stack, until
from tests.openai.test_encoding import Bundle
from tests.openai.test_serving import FakeDelta, World, a_job, drain, world  # noqa: F401
from tests.openai.wire import HELLO, post

PATH, MODEL, DIMS = "/v1/embeddings", "vectors", 16
SLOW_MODEL = "slow-vectors"
TEXTS = ["Hello", "Another, longer text", "Hello"]


def embedded(stack: Stack, key: str, text: Any, **fields: Any) -> dict[str, Any]:
    answer = post(stack, PATH, {"model": MODEL, "input": text, **fields}, key=key)
    assert answer.status_code == 200, answer.text
    return answer.json() | {"request_id": answer.headers["x-engine-request-id"]}


TOKENIZER = Tokenizer.from_str(make_bundle(spec(), SimulatedParams()).tokenizer_json.decode())


def ids_of(text: str) -> list[int]:
    """The simulated model's tokens: one for each byte."""
    return TOKENIZER.encode(text).ids


def expected(text: str) -> list[float]:
    """The vector that the simulated model gives."""
    return array("f", vector(tuple(ids_of(text)), DIMS)).tolist()


# --- clients ------------------------------------------------------------------------------------
def test_openai_python_gets_floats_though_it_asks_for_base64(client: openai.OpenAI) -> None:
    """By default it sends ``encoding_format: base64`` and decodes the answer itself."""
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, text in zip(answer.data, TEXTS, strict=True):
        assert one.embedding == pytest.approx(expected(text), abs=1e-7)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
    assert (answer.object, answer.model, answer.data[0].object) == ("list", MODEL, "embedding")


def test_openai_python_asks_for_floats_and_fewer_of_them(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(
        model=MODEL, input="Hello", encoding_format="float", dimensions=5
    )
    (one,) = answer.data
    whole = np.array(expected("Hello")[:5])
    assert one.embedding == pytest.approx((whole / np.linalg.norm(whole)).tolist(), abs=1e-6)
    assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-6)


async def test_openai_pythons_async_client(stack: Stack, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway.url}/v1", api_key=key) as client:
        answers = await asyncio.gather(
            *[client.embeddings.create(model=MODEL, input=f"text {n}") for n in range(20)]
        )
    for number, answer in enumerate(answers):
        assert answer.data[0].embedding == pytest.approx(expected(f"text {number}"), abs=1e-7)


def test_without_a_format_an_answer_is_floats(stack: Stack, key: str) -> None:
    """litellm names none and passes on what comes; base64 is little-endian float32."""
    answer = embedded(stack, key, "Hello")
    assert set(answer) == {"object", "data", "model", "usage", "request_id"}
    floats = answer["data"][0]["embedding"]
    assert floats == pytest.approx(expected("Hello"), abs=1e-7)
    text = embedded(stack, key, "Hello", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(b64decode(text), "<f4").tolist() == floats


def test_token_ids_are_the_models_own(stack: Stack, key: str) -> None:
    """One list of them, a list of lists, and texts beside them."""
    ids = ids_of("Hello")
    for given, count in ((ids, 1), ([ids, ids], 2), ([ids, "Hello"], 2)):
        data = embedded(stack, key, given)["data"]
        assert len(data) == count
        for one in data:
            assert one["embedding"] == pytest.approx(expected("Hello"), abs=1e-7)


def test_as_many_inputs_as_the_model_takes_in_the_order_they_came(stack: Stack, key: str) -> None:
    """A hundred inputs are four orders, and one request on record."""
    texts = [f"text {number} {'x' * (number % 13)}" for number in range(100)]
    answer = embedded(stack, key, texts)
    for index, (one, text) in enumerate(zip(answer["data"], texts, strict=True)):
        assert one["index"] == index
        assert one["embedding"] == pytest.approx(expected(text), abs=1e-7)
    tries = attempts_of(stack, answer["request_id"])
    assert [one["choice"] for one in tries] == [0, 1, 2, 3]
    assert all(one["outcome"] == "ok" and one["queue_ms"] is not None for one in tries)


# --- the record ---------------------------------------------------------------------------------
def test_one_record_with_the_prompts_tokens_and_their_price(stack: Stack, key: str) -> None:
    price = Price(20_000, 20_000, 900_000)
    command = model.SetModelPrice(MODEL, "v1", price, time.time())
    stack.order(model.DECIDER, f"model-{MODEL}", command)
    num_tokens = sum(map(len, TEXTS))

    def asked() -> dict[str, Any]:
        return record_of(stack, embedded(stack, key, TEXTS, user="ann")["request_id"])

    until(lambda: asked()["price_input"] == price.input, 5)
    before = usage_of(stack, "acme")
    row = asked()
    assert (row["endpoint"], row["outcome"], row["finish_reason"]) == ("embeddings", "ok", "stop")
    assert (row["num_prompt_tokens"], row["num_output_tokens"]) == (num_tokens, 0)
    assert row["price"] == num_tokens * price.input
    assert (row["end_user"], row["node_id"], row["ttft_ms"]) == ("ann", "n1", None)
    assert usage_of(stack, "acme") - before == num_tokens


def test_the_answer_names_node_version_and_limits(stack: Stack, key: str) -> None:
    headers = post(stack, PATH, {"model": MODEL, "input": "Hello"}, key=key).headers
    assert headers["x-engine-node"] == "n1"
    assert headers["x-engine-model-version"] == "vectors@v1"
    assert headers["x-request-id"] and int(headers["x-ratelimit-remaining-tokens"]) > 0
    sent = post(stack, PATH, {"model": MODEL, "input": "a"}, key=key, headers={"X-Request-Id": "q"})
    assert sent.headers["x-request-id"] == "q"


def test_models_are_listed_as_ever(client: openai.OpenAI) -> None:
    chat, vectors = client.models.retrieve("fast"), client.models.retrieve(MODEL)
    assert set(chat.model_dump()) == set(vectors.model_dump())
    assert vectors.model_dump()["max_model_len"] == 64


def test_a_client_that_leaves_midway_pays_for_the_inputs_that_were_computed(
    stack: Stack, key: str
) -> None:
    """A hundred inputs of 4 tokens, of which the node computes ten a second: some are billed, not
    all, in one record, and the tenant has used just as many."""
    used, known = usage_of(stack, "acme"), {row["request_id"] for row in requests_of(stack, "acme")}
    texts = [f"{number:04}" for number in range(100)]
    connection = asked_for(stack, key, {"model": SLOW_MODEL, "input": texts})

    def mine() -> list[dict[str, Any]]:
        return [row for row in requests_of(stack, "acme") if row["request_id"] not in known]

    until(lambda: len(mine()) == 1, 5)
    time.sleep(1.0)
    connection.close()
    until(lambda: mine()[0]["outcome"], 5)
    (row,) = mine()
    assert row["outcome"] == "cancelled"
    assert 4 <= row["num_prompt_tokens"] < 400 and row["num_prompt_tokens"] % 4 == 0
    assert row["num_output_tokens"] == 0
    assert row["price"] == row["num_prompt_tokens"] * row["price_input"]
    until(lambda: usage_of(stack, "acme") != used, 5)
    assert usage_of(stack, "acme") - used == row["num_prompt_tokens"]


def asked_for(stack: Stack, key: str, fields: dict[str, Any]) -> socket.socket:
    """The connection on which the request was sent; nothing of the answer is read."""
    connection = socket.create_connection(("127.0.0.1", stack.gateway.port), timeout=10)
    body = json.dumps(fields).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


# --- refusals -----------------------------------------------------------------------------------
LONG = "x" * 65
REFUSED = [
    ({"input": ""}, "empty_prompt", "input"),
    ({"input": "  \n"}, "empty_prompt", "input"),
    ({"input": []}, "empty_prompt", "input"),
    ({"input": [[]]}, "empty_prompt", "input"),
    ({"input": ["a", ""]}, "empty_prompt", "input"),
    ({"input": None}, "missing_field", "input"),
    ({"input": 7}, "invalid_type", "input"),
    ({"input": {"text": "a"}}, "invalid_type", "input"),
    ({"input": ["a", 7]}, "invalid_type", "input"),
    ({"input": [1, "a"]}, "invalid_type", "input"),
    ({"input": [1, -1]}, "invalid_token_id", "input"),
    ({"input": [1, 1000]}, "invalid_token_id", "input"),
    ({"input": ["a"] * 101}, "invalid_parameter", "input"),
    ({"input": ["a"] * 2049}, "invalid_parameter", "input"),
    ({"input": LONG}, "context_length_exceeded", "input"),
    ({"input": ["a", LONG]}, "context_length_exceeded", "input"),
    ({"input": "a " * 4000}, "context_length_exceeded", "input"),
    ({"input": [1] * 65}, "context_length_exceeded", "input"),
    ({"encoding_format": "int8"}, "invalid_parameter", "encoding_format"),
    ({"dimensions": 0}, "invalid_parameter", "dimensions"),
    ({"dimensions": 17}, "invalid_parameter", "dimensions"),
    ({"dimensions": "8"}, "invalid_type", "dimensions"),
    ({"temperature": 0}, "unknown_field", "temperature"),
    ({"model": "fast"}, "model_task_mismatch", "model"),
]


@pytest.mark.parametrize(("change", "code", "param"), REFUSED)
def test_a_bad_request_is_refused_by_name_and_leaves_no_record(
    stack: Stack, key: str, change: dict[str, Any], code: str, param: str
) -> None:
    body = {"model": MODEL, "input": "a"} | change
    answer = post(stack, PATH, body, key=key)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), answer.text
    assert error["type"] == "invalid_request_error"
    assert "x-engine-request-id" not in answer.headers


def test_what_is_too_long_says_so_in_the_words_that_litellm_looks_for(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
        client.embeddings.create(model=MODEL, input=LONG)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_embedding_model_does_not_chat(stack: Stack, key: str, path: str) -> None:
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "Hello"}
    answer = post(stack, path, {"model": MODEL, **asked}, key=key)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "model_task_mismatch")
    assert "/v1/embeddings" in error["message"]


def test_strangers_and_foreign_models_learn_nothing(stack: Stack, key: str) -> None:
    assert post(stack, PATH, {"model": MODEL, "input": "a"}).status_code == 401
    bodies = [
        post(stack, PATH, {"model": name, "input": "a"}, key=key).json()["error"]
        for name in ("private", "absent")
    ]
    assert [one["code"] for one in bodies] == ["model_not_found"] * 2
    assert bodies[0]["message"].replace("private", "absent") == bodies[1]["message"]


def test_a_budget_covers_it_or_it_is_refused(stack: Stack) -> None:
    """Reserved and billed are the prompt's tokens, and nothing for an output."""
    mine = stack.add_tenant("thrifty", budget=12)
    until(lambda: post(stack, "/v1/completions", {}, key=mine).status_code != 401, 10)
    assert post(stack, PATH, {"model": MODEL, "input": "x" * 12}, key=mine).status_code == 200
    answer = post(stack, PATH, {"model": MODEL, "input": "a"}, key=mine)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")


def test_a_model_that_is_not_loaded_is_refused_in_time(stack: Stack, key: str) -> None:
    body = {"model": "cold-vectors", "input": ["a", "b"]}
    answer = post(stack, PATH, body, key=key, headers={"X-Latency-Class": "realtime"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] in ("model_cold", "model_not_ready", "hold_expired")
    assert 1 <= int(answer.headers["retry-after"]) <= 120


# --- how inputs become orders and tokens --------------------------------------------------------
@pytest.mark.parametrize("num", [1, 31, 32, 33, 70, 2048])
@pytest.mark.parametrize("max_tokens", [1, 256, 8192, 100_000])
def test_inputs_are_dealt_out_evenly_and_to_few_orders(num: int, max_tokens: int) -> None:
    counts = dealt(num, max_tokens)
    assert sum(counts) == num and max(counts) - min(counts) <= 1
    assert max(counts) <= INPUTS_AT_ONCE == MAX_INPUTS
    assert max(counts) == 1 or max(counts) * max_tokens <= TOKENS_AT_ONCE


def test_a_shortened_vector_has_length_one() -> None:
    assert shortened(np.array([3, 4, 12], "<f4"), 2).tolist() == pytest.approx([0.6, 0.8])
    assert shortened(np.array([0, 0, 1], "<f4"), 2).tolist() == [0, 0]
    whole = np.array([3, 4], "<f4")
    assert shortened(whole, None) is whole and shortened(whole, 2) is whole


def word_encoder() -> Encoder:
    content = word_pieces().to_str().encode()
    return Encoder(Bundle(content, chat_template="", vocab_size=len(VOCAB), max_model_len=12))


async def test_texts_are_encoded_without_the_files_padding_and_truncation() -> None:
    """Its tokenizer.json pads and cuts to 8; [CLS] and [SEP] stand around each text."""
    inputs = await word_encoder().inputs(["The cat sat", "a b c d a b c d", [5, 6]], 12)
    assert inputs == [(2, 5, 6, 8, 3), (2, *(13, 14, 15, 16) * 2, 3), (5, 6)]


async def test_a_text_cannot_speak_a_control_token() -> None:
    """Nor end its input early: ``[SEP]`` in it is three words that the model does not know."""
    ((first, *inside, last),) = await word_encoder().inputs(["cat [SEP] dog"], 12)
    assert (first, last) == (2, 3)
    assert not {2, 3} & set(inside)


async def test_tokens_are_counted_exactly() -> None:
    encoder = word_encoder()
    assert len((await encoder.inputs(["a " * 10], 12))[0]) == 12
    for text in ("a " * 11, "cats " * 6, "a " * 100_000):
        with pytest.raises(Refused) as refusal:
            await encoder.inputs(["a", text], 12)
        assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "input")
    assert len((await encoder.inputs([" " * 100_000 + "a"], 12))[0]) == 3


async def test_many_texts_leave_the_event_loop_free() -> None:
    """Two megabytes are encoded in a thread; meanwhile others are served."""
    encoder = Encoder(make_bundle(spec(max_model_len=2000), SimulatedParams()))
    task = asyncio.create_task(encoder.inputs(["x" * 1000] * 2000, 2000))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 5 and len(await task) == 2000


# --- served -------------------------------------------------------------------------------------
def embedding_job(**changes: Any) -> Any:
    fields = {
        "endpoint": "embeddings",
        "prompts": ((1, 2, 3), (4,)),
        "max_tokens": (0, 0),
        "input_lengths": ((1, 2), (1,)),
    }
    return a_job(**fields | changes)


DONE = FakeDelta(finish_reason="stop", embeddings=(b"1234",))
LOST = FakeDelta(finish_reason="error", error_code="node_lost")


async def test_each_prompt_is_an_order_that_says_where_its_inputs_end(world: World) -> None:  # noqa: F811
    call = await world.serving.start(embedding_job())
    orders = [order for _, order in world.nodes.orders]
    assert [(o.input_lengths, o.max_tokens) for o in orders] == [((1, 2), 0), ((1,), 0)]
    (intent,) = world.ledger.intents
    assert (intent.num_prompt_tokens, intent.max_output_tokens) == (4, 0)
    world.say("req-1-0", DONE)
    world.say("req-1-1", DONE)
    assert await drain(call) == ""
    await call.finish()
    (terminal,) = world.ledger.terminals
    assert (terminal.outcome, terminal.num_prompt_tokens, terminal.num_output_tokens) == (
        "ok", 4, 0
    )  # fmt: skip
    assert terminal.queue_ms is not None and world.limits.given_back == [4]


async def test_a_lost_part_is_computed_elsewhere_and_only_that_part(world: World) -> None:  # noqa: F811
    call = await world.serving.start(embedding_job())
    world.say("req-1-0", DONE)
    world.say("req-1-1", LOST)
    draining = asyncio.create_task(drain(call))
    async with asyncio.timeout(5):
        while len(world.nodes.orders) < 3:
            await asyncio.sleep(0)
    node_id, again = world.nodes.orders[-1]
    assert (node_id, again.request_id, again.input_lengths) == ("n2", "req-1-1_2", (1,))
    world.say("req-1-1_2", DONE)
    await draining
    await call.finish()
    (terminal,) = world.ledger.terminals
    assert (terminal.outcome, terminal.attempts) == ("ok", 2)


async def test_who_leaves_pays_for_the_parts_that_are_done_and_for_what_the_others_had(
    world: World,  # noqa: F811
) -> None:
    """The first order is whole, the second had one of its two inputs, the third none yet."""
    job = embedding_job(
        prompts=((1, 2, 3), (4, 5, 6), (7,)),
        input_lengths=((1, 2), (2, 1), (1,)),
        max_tokens=(0, 0, 0),
    )
    call = await world.serving.start(job)
    computed = {"req-1-1": 2, "req-1-2": 0}

    async def cancel(request_id: str) -> None:
        end = FakeDelta(finish_reason="cancelled", num_computed_tokens=computed[request_id])
        world.say(request_id, end)

    world.nodes.cancel = cancel  # type: ignore[method-assign]
    world.say("req-1-0", DONE)
    call.client_left()
    await call.finish()
    assert await call.finish() is None
    (terminal,) = world.ledger.terminals
    assert (terminal.outcome, terminal.num_prompt_tokens) == ("cancelled", 5)
    assert world.limits.given_back == [5]


async def test_an_error_is_never_taken_for_the_end(world: World) -> None:  # noqa: F811
    """Nothing is to be generated, so nothing is ever complete without its vectors."""
    world.nodes.replicas[:] = [Target("n1", "r1")]
    call = await world.serving.start(embedding_job(prompts=((1,),), input_lengths=((1,),),
                                                   max_tokens=(0,)))  # fmt: skip
    world.say("req-1", replace(LOST, error_code="numerical_error"))
    await drain(call)
    await call.finish()
    assert call.error is not None and call.error.code == "numerical_error"
    (terminal,) = world.ledger.terminals
    assert (terminal.outcome, terminal.num_prompt_tokens) == ("error", 0)


async def test_a_held_request_is_dealt_out_as_it_was_reserved(world: World) -> None:  # noqa: F811
    """Its parts are known before its tokens; they are filled in when the tokenizer is there."""
    world.nodes.replicas.clear()
    world.nodes.loads_in = 5.0

    async def encode(job: Any) -> None:
        job.prompts, job.input_lengths = ((1, 2, 3), (4,)), ((1, 2), (1,))

    empty = {"prompts": ((), ()), "input_lengths": ((0, 0), (0,)), "max_prompt_tokens": 192}
    call = await world.serving.start(embedding_job(**empty, encode=encode))
    assert world.ledger.intents[0].num_prompt_tokens == 192
    world.nodes.replicas.append(Target("n1", "r1"))
    world.nodes.loads_in = None
    async with asyncio.timeout(5):
        while len(world.nodes.orders) < 2:
            await asyncio.sleep(0.01)
    assert [o.input_lengths for _, o in world.nodes.orders] == [((1, 2)), (1,)]
    world.say("req-1-0", DONE)
    world.say("req-1-1", DONE)
    await drain(call)
    await call.finish()
    assert world.ledger.terminals[0].num_prompt_tokens == 4


def test_a_captured_request_keeps_its_inputs() -> None:
    """As the prompt of a completion is kept; vectors are no text."""
    from controlplane.entrypoints.openai.capturing import _prompt
    from controlplane.entrypoints.openai.handlers import _read

    body = json.dumps({"model": MODEL, "input": ["Hello", [1, 2]]}).encode()
    with pytest.raises(Refused):
        _read("embeddings", body.replace(b"[1, 2]", b"[1.5]"))
    assert _prompt(_read("embeddings", body)) == [("prompt", "Hello"), ("tokens", "[1,2]")]
