"""Server-sent events as the SDKs need them; see the table of deviations in the API notes."""

import socket
import time
from typing import Any

import openai
import pytest

from tests.openai.ledger import record_of, requests_of
from tests.openai.stack import Stack, until
from tests.openai.wire import CLIENT, HELLO, deltas, post, stream

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "fast", "messages": HELLO, "max_tokens": 6} | fields


def test_the_role_stands_in_the_first_delta_only(stack: Stack, key: str) -> None:
    """Repeating it makes "assistantassistant" in openai's stream helper."""
    found = list(deltas(stream(stack, key, CHAT, asked())))
    assert found[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in found[1:])
    assert found[-1] == {}


def test_every_stream_ends_with_a_finish_reason_and_done(stack: Stack, key: str) -> None:
    """One finish reason, on the last chunk with choices; then DONE."""
    chunks = stream(stack, key, CHAT, asked())
    assert chunks[-1] == "[DONE]" and "[DONE]" not in chunks[:-1]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_not_sent_unasked(stack: Stack, key: str, options: Any) -> None:
    """A chunk without choices breaks naive loops, so there is none unless asked for."""
    chunks = stream(stack, key, CHAT, asked(stream_options=options))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks[:-1])


def test_usage_is_one_chunk_when_asked(stack: Stack, key: str) -> None:
    """Null on every chunk, then one with the counts and no choices."""
    chunks = stream(stack, key, CHAT, asked(stream_options={"include_usage": True}))[:-1]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6


def test_chunks_share_id_time_model_and_object(stack: Stack, key: str) -> None:
    """As the client's types require."""
    chunks = stream(stack, key, CHAT, asked())[:-1]
    names = ("id", "created", "model", "object", "system_fingerprint")
    assert len({tuple(chunk[name] for name in names) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk" and isinstance(chunks[0]["created"], int)


def test_the_stream_helper_of_the_client_works(client: openai.OpenAI) -> None:
    """``chat.completions.stream`` folds the chunks into one completion."""
    with client.chat.completions.stream(model="ends", messages=HELLO) as helper:
        for _ in helper:
            pass
        final = helper.get_final_completion()
    assert final.choices[0].message.role == "assistant"
    assert len(final.choices[0].message.content.split()) == 5


def test_choices_of_one_request_are_told_apart(stack: Stack, key: str) -> None:
    """n = 3: each index has one role, a text and one finish reason; the prompt counts once."""
    body = asked(n=3, stream_options={"include_usage": True})
    chunks = stream(stack, key, CHAT, body)[:-1]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert sum("role" in choice["delta"] for choice in mine) == 1
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
    usage = chunks[-1]["usage"]
    one = post(stack, CHAT, asked(), key=key).json()["usage"]
    assert usage["completion_tokens"] == 18 and usage["prompt_tokens"] == one["prompt_tokens"]


def test_logprobs_come_with_bytes_and_alternatives(stack: Stack, key: str) -> None:
    """Always a list of alternatives, also an empty one; streamed and whole agree."""
    for top in (0, 2):
        body = asked(logprobs=True, top_logprobs=top, max_tokens=3)
        whole = post(stack, CHAT, body, key=key).json()["choices"][0]["logprobs"]["content"]
        chunks = stream(stack, key, CHAT, body)[:-1]
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        streamed = [entry for part in parts if part for entry in part["content"]]
        assert streamed == whole and len(whole) == 3
        assert all(len(entry["top_logprobs"]) == top for entry in whole)
        assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in whole)


def test_text_completions_take_strings_lists_and_token_ids(client: openai.OpenAI) -> None:
    """Choices of several prompts are numbered prompt by prompt."""
    one = client.completions.create(model="fast", prompt="ab", max_tokens=3, n=2)
    assert [choice.index for choice in one.choices] == [0, 1]
    many = client.completions.create(model="fast", prompt=["ab", "cd"], max_tokens=3)
    assert many.choices[0].text == one.choices[0].text != many.choices[1].text
    assert many.usage.prompt_tokens == 4 and many.usage.completion_tokens == 6
    ids = client.completions.create(model="fast", prompt=[[5, 6], [7]], max_tokens=2, logprobs=1)
    assert ids.usage.prompt_tokens == 3
    assert ids.choices[0].logprobs.text_offset[0] == 0
    assert len(ids.choices[0].logprobs.token_logprobs) == 2


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    """finish_reason is stop and the string itself is not shown."""
    whole = client.completions.create(model="fast", prompt="ab", max_tokens=8).choices[0].text
    stop = whole.split()[3]
    cut = client.completions.create(model="fast", prompt="ab", max_tokens=8, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop" and cut.text == whole[: whole.index(stop)]


def test_the_end_token_ends_with_stop(client: openai.OpenAI) -> None:
    """A model that ends by itself; with ignore_eos it goes on."""
    ended = client.chat.completions.create(model="ends", messages=HELLO)
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens == 5
    longer = client.chat.completions.create(
        model="ends", messages=HELLO, max_tokens=9, extra_body={"ignore_eos": True}
    )
    assert longer.usage.completion_tokens == 9


def test_headers_say_who_answered(stack: Stack, key: str) -> None:
    """Request id echoed or made, node, exact version, time, and the rate limits."""
    answer = post(stack, CHAT, asked(), key=key, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-engine-node"] == "n1"
    assert answer.headers["x-engine-model-version"] == "fast@v1"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert int(answer.headers["x-ratelimit-remaining-requests"]) > 0
    assert answer.headers["x-ratelimit-reset-tokens"].endswith("s")
    made = post(stack, CHAT, asked(), key=key).headers
    assert made["x-request-id"] == made["x-engine-request-id"]
    assert record_of(stack, made["x-request-id"])["outcome"] == "ok"


def test_the_record_is_there_when_done_is_read(stack: Stack, key: str) -> None:
    """Whoever has read the end of a stream finds the request settled, with its counts."""
    answer = post(stack, CHAT, asked(stream=True), key=key)
    row = record_of(stack, answer.headers["x-engine-request-id"])
    assert (row["outcome"], row["finish_reason"], row["num_output_tokens"]) == ("ok", "length", 6)
    assert row["node_id"] == "n1" and row["version_id"] == "fast@v1" and row["ttft_ms"] > 0


def test_a_latency_class_is_recorded(stack: Stack, key: str) -> None:
    """By header or by service_tier; the answer names the tier as OpenAI does."""
    answer = post(stack, CHAT, asked(service_tier="flex"), key=key)
    assert answer.json()["service_tier"] == "flex"
    row = record_of(stack, answer.headers["x-engine-request-id"])
    assert row["latency_class"] == "batch"
    answer = post(stack, CHAT, asked(), key=key, headers={"X-Latency-Class": "realtime"})
    row = record_of(stack, answer.headers["x-engine-request-id"])
    assert row["latency_class"] == "realtime"


def _open_stream(stack: Stack, key: str, body: bytes, window: int = 0) -> socket.socket:
    connection = socket.socket()
    if window:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.connect(("127.0.0.1", stack.gateway.port))
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


def test_a_client_that_leaves_stops_and_pays_for_what_was_made(stack: Stack, key: str) -> None:
    """Within a second the request is settled as cancelled, with some but not all tokens."""
    body = b'{"model":"slow","messages":[{"role":"user","content":"x"}],"stream":true}'
    connection = _open_stream(stack, key, body)
    text = b""
    while text.count(b'"content":"tok') < 3:
        text += connection.recv(65536)
    (request_id,) = [
        line.split(b": ")[1].decode()
        for line in text.split(b"\r\n")
        if line.startswith(b"x-engine-request-id")
    ]
    connection.close()
    until(lambda: record_of(stack, request_id)["outcome"], 3)
    row = record_of(stack, request_id)
    assert row["outcome"] == "cancelled" and 3 <= row["num_output_tokens"] <= 60
    assert row["num_prompt_tokens"] > 0


def test_a_client_that_leaves_before_the_first_token_pays_nothing(stack: Stack, key: str) -> None:
    """The request is on record, cancelled, with no token."""
    before = {row["request_id"] for row in requests_of(stack, "acme")}
    body = b'{"model":"slow","messages":[{"role":"user","content":"y"}]}'
    _open_stream(stack, key, body).close()

    def settled() -> list[dict[str, Any]]:
        rows = requests_of(stack, "acme")
        return [r for r in rows if r["request_id"] not in before and r["outcome"]]

    time.sleep(0.3)
    until(lambda: len(settled()) == len([
        r for r in requests_of(stack, "acme") if r["request_id"] not in before
    ]), 5)  # fmt: skip
    for row in settled():
        assert row["outcome"] == "cancelled"
        assert row["num_prompt_tokens"] == 0 or row["num_output_tokens"] > 0


def test_what_is_billed_was_generated(stack: Stack, key: str) -> None:
    """The sum over the records equals the usage rows, tenant by tenant."""
    post(stack, CHAT, asked(n=2), key=key)
    rows = [row for row in requests_of(stack, "acme") if row["outcome"]]
    total = sum(row["num_prompt_tokens"] + row["num_output_tokens"] for row in rows)
    from tests.openai.ledger import usage_of

    until(lambda: usage_of(stack, "acme") >= total, 5)
    rows = [row for row in requests_of(stack, "acme") if row["outcome"]]
    total = sum(row["num_prompt_tokens"] + row["num_output_tokens"] for row in rows)
    assert usage_of(stack, "acme") == total


def test_models_are_listed_as_the_client_expects(client: openai.OpenAI) -> None:
    """Own and public models and aliases, no foreign ones; an exact version by its id."""
    listed = {model.id: model for model in client.models.list()}
    assert {"fast", "slow", "quick", "cold"} <= listed.keys() and "private" not in listed
    assert listed["fast"].object == "model" and listed["fast"].created > 0
    assert client.models.retrieve("fast@v1").id == "fast@v1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/absent@v1")


def test_an_alias_and_a_pin_reach_the_version(stack: Stack, key: str) -> None:
    """The answer names what was asked for; the header, what answered."""
    for name in ("quick", "fast@v1"):
        answer = post(stack, CHAT, asked(model=name), key=key)
        assert answer.json()["model"] == name
        assert answer.headers["x-engine-model-version"] == "fast@v1"


def test_probes_are_open_and_metrics_for_operators(stack: Stack, key: str) -> None:
    """The metrics, of every tenant, have vLLM's names under our prefix."""
    post(stack, CHAT, asked(stream=True), key=key)
    for path in ("/health", "/livez", "/readyz"):
        assert CLIENT.get(stack.gateway.url + path).status_code == 200
    url, scopes = stack.gateway.url + "/metrics", ("inference", "admin:read")
    stack.add_tenant("operators")
    own = stack.add_key("acme", scopes, role="auditor")
    for token in (key, own):
        refused = CLIENT.get(url, headers={"Authorization": f"Bearer {token}"})
        assert refused.status_code == 403
    assert CLIENT.get(url).status_code == 401
    ours = stack.add_key("operators", scopes, role="auditor")
    text = CLIENT.get(url, headers={"Authorization": f"Bearer {ours}"}).text
    assert 'engine:time_to_first_token_seconds_bucket{le="0.001",model_name="fast@v1"}' in text
    assert 'engine_tenant_tokens_total{kind="generation",tenant="acme"}' in text
    assert 'engine_class_tokens_total{latency_class="standard",tenant="acme"}' in text
    for name in ("inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert f"engine:{name}_count" in text


def test_a_browser_may_ask(stack: Stack, key: str) -> None:
    """Preflight and answer allow any origin: there are no cookies to steal."""
    answer = CLIENT.options(stack.gateway.url + CHAT, headers={"Origin": "http://a.example"})
    assert answer.status_code == 204
    assert "authorization" in answer.headers["access-control-allow-headers"]
    answer = post(stack, CHAT, asked(), key=key, headers={"Origin": "http://a.example"})
    assert answer.headers["access-control-allow-origin"] == "*"
