"""Bad input gets a typed 4xx in the one envelope: never a 5xx, never a dead process."""

import http.client
import json
import socket
import time
from typing import Any

import openai
import pytest

from controlplane.application.refused import Refused
from controlplane.entrypoints.openai.errors import headers_of, status_of
from tests.openai.stack import Stack
from tests.openai.wire import CLIENT, HELLO, post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "fast", "messages": HELLO, "max_tokens": 2} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "fast", "prompt": "Hello", "max_tokens": 2} | fields


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "Hello"} | fields])


BODIES = [
    # raw JSON
    (CHAT, b"[" * 20_000, "json_too_deep"),
    (CHAT, b'{"a":' * 100 + b"1" + b"}" * 100, "json_too_deep"),
    (CHAT, b'{"model":"\\ud800"}', "invalid_unicode"),
    (CHAT, b'{"model":"a\\u0000b"}', "invalid_unicode"),
    (CHAT, b'{"model":"\xff"}', "invalid_unicode"),
    (CHAT, b'{"temperature":NaN}', "invalid_number"),
    (CHAT, b'{"temperature":Infinity}', "invalid_number"),
    (CHAT, b'{"temperature":1e999}', "invalid_number"),
    (CHAT, b'{"seed":' + b"9" * 5000 + b"}", "invalid_number"),
    (CHAT, b'{"model":"a","model":"b"}', "duplicate_key"),
    (CHAT, b"{", "invalid_json"),
    (CHAT, b"", "invalid_json"),
    (CHAT, b'{"model":"a",}', "invalid_json"),
    (CHAT, b"[]", "invalid_type"),
    # fields
    (CHAT, chat(max_tokens="12"), "invalid_type"),
    (CHAT, chat(max_tokens=1.0), "invalid_type"),
    (CHAT, chat(max_tokens=True), "invalid_type"),
    (CHAT, chat(stream="yes"), "invalid_type"),
    (CHAT, chat(model=7), "invalid_type"),
    (CHAT, chat(model=""), "invalid_parameter"),
    (CHAT, {"messages": HELLO}, "missing_field"),
    (CHAT, {"model": "fast"}, "missing_field"),
    (CHAT, chat(nonsense=1), "unknown_field"),
    (CHAT, chat(chat_template="x"), "unknown_field"),
    (CHAT, chat(chat_template_kwargs={"tokenize": True}), "unknown_field"),
    (TEXT, text(prompt_embeds="x"), "unknown_field"),
    (CHAT, chat(n=10**9), "invalid_parameter"),
    (CHAT, chat(n=0), "invalid_parameter"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "invalid_parameter"),
    (CHAT, chat(top_logprobs=2), "invalid_parameter"),
    (TEXT, text(logprobs=-1), "invalid_parameter"),
    (TEXT, text(best_of=3), "unsupported_parameter"),
    (TEXT, text(best_of=True), "invalid_type"),
    (TEXT, text(best_of="1"), "invalid_type"),
    (TEXT, text(echo=True), "unsupported_parameter"),
    (TEXT, text(echo=0), "invalid_type"),
    (CHAT, chat(reasoning_effort=3), "invalid_type"),
    (CHAT, chat(metadata="a"), "invalid_type"),
    (CHAT, chat(store="yes"), "invalid_type"),
    (CHAT, chat(parallel_tool_calls=1), "invalid_type"),
    (CHAT, chat(prediction="x"), "invalid_type"),
    (CHAT, chat(priority=1.5), "invalid_type"),
    (CHAT, chat(max_tokens=0), "context_length_exceeded"),
    (CHAT, chat(max_tokens=-1), "context_length_exceeded"),
    (CHAT, chat(max_tokens=2**31), "context_length_exceeded"),
    (CHAT, chat(max_tokens=5000), "context_length_exceeded"),
    (CHAT, chat(temperature=1e308), "invalid_parameter"),
    (CHAT, chat(temperature=-0.1), "invalid_parameter"),
    (CHAT, chat(top_p=0), "invalid_parameter"),
    (CHAT, chat(top_k=-5), "invalid_parameter"),
    (CHAT, chat(presence_penalty=1e9), "invalid_parameter"),
    (CHAT, chat(repetition_penalty=0), "invalid_parameter"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(2000)}), "invalid_parameter"),
    (CHAT, chat(logit_bias={"999999": 1}), "invalid_parameter"),
    (CHAT, chat(logit_bias={"-1": 1}), "invalid_parameter"),
    (CHAT, chat(logit_bias={"1": 1e9}), "invalid_parameter"),
    (CHAT, chat(stop=["x"] * 10_000), "invalid_parameter"),
    (CHAT, chat(stop=""), "invalid_parameter"),
    (CHAT, chat(stop="x" * 1000), "invalid_parameter"),
    (CHAT, chat(stream_options={"include_usage": True}), "invalid_parameter"),
    (CHAT, chat(service_tier="gold"), "invalid_parameter"),
    (CHAT, chat(response_format={"type": "json_object"}), "unsupported_parameter"),
    (CHAT, chat(response_format=7), "invalid_type"),
    (CHAT, chat(tools=[{"type": 7}]), "unsupported_parameter"),
    # messages and prompts
    (CHAT, chat(messages=[]), "empty_prompt"),
    (CHAT, message(content=" \n"), "empty_prompt"),
    (CHAT, chat(messages="hi"), "invalid_type"),
    (CHAT, chat(messages=["hi"]), "invalid_type"),
    (CHAT, message(content=7), "invalid_type"),
    (CHAT, message(role="wizard"), "invalid_parameter"),
    (CHAT, message(role=["user"]), "invalid_parameter"),
    (CHAT, message(role="tool"), "unsupported_parameter"),
    (CHAT, message(secret="x"), "unknown_field"),
    (CHAT, message(content=[{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]),
     "modality_not_supported"),
    (CHAT, message(content=[{"type": "text", "text": 7}]), "invalid_type"),
    (CHAT, message(content="word " * 5000), "context_length_exceeded"),
    (CHAT, message(content="x" * 1_000_000), "context_length_exceeded"),
    (CHAT, message(content="́" * 1_000_000), "context_length_exceeded"),
    (TEXT, text(prompt=""), "empty_prompt"),
    (TEXT, text(prompt=[]), "empty_prompt"),
    (TEXT, text(prompt=[[]]), "empty_prompt"),
    (TEXT, text(prompt=[-1]), "invalid_token_id"),
    (TEXT, text(prompt=[10**6]), "invalid_token_id"),
    (TEXT, text(prompt=[2**40]), "invalid_token_id"),
    (TEXT, text(prompt=[1, "a"]), "invalid_type"),
    (TEXT, text(prompt=[1, True]), "invalid_type"),
    (TEXT, text(prompt=["a"] * 1000), "invalid_parameter"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "code"), BODIES, ids=[f"{code}-{i}" for i, (_, _, code) in enumerate(BODIES)]
)
def test_a_bad_body_gets_its_own_code(
    stack: Stack, key: str, path: str, body: Any, code: str
) -> None:
    """400, the envelope, the code, within a second; nothing of the inside is told."""
    began = time.monotonic()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = post(stack, path, key=key, content=content)
    assert time.monotonic() - began < 1
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), answer.text[:500]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["type"] == "invalid_request_error"
    assert error["request_id"] == answer.headers["x-request-id"]
    assert "Traceback" not in answer.text and "/" not in error["message"].replace("/v1", "")


HEADERS = [
    ({"Content-Type": "text/xml"}, 415, "unsupported_media_type"),
    ({"Content-Type": "multipart/form-data; boundary=x"}, 415, "unsupported_media_type"),
    ({"Content-Encoding": "gzip"}, 415, "unsupported_encoding"),
    ({"Host": "evil.example"}, 400, "bad_host"),
    ({"Host": "127.0.0.1:8001@evil.example"}, 400, "bad_host"),
    ({"X-Latency-Class": "warp"}, 400, "invalid_parameter"),
    ({"Authorization": "Bearer ' OR '1'='1"}, 401, "invalid_token"),
    ({"Authorization": "Basic eDp5"}, 401, "invalid_api_key"),
    ({"Authorization": "Bearer"}, 401, "invalid_api_key"),
    ({"Authorization": "Bearer sk_000000000000." + "x" * 43}, 401, "invalid_api_key"),
    ({"Authorization": "Bearer tkt_e30.AAAA"}, 401, "invalid_token"),
    ({"Authorization": "Bearer " + "a" * 9000}, 401, "invalid_token"),
]


@pytest.mark.parametrize(("headers", "status", "code"), HEADERS)
def test_a_bad_header_is_refused(
    stack: Stack, key: str, headers: dict[str, str], status: int, code: str
) -> None:
    """Type, encoding, host and token are each checked before the body is."""
    answer = post(stack, CHAT, chat(), key=key, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_without_a_key_nothing_is_served(stack: Stack) -> None:
    """401 for every path under /v1, whatever the body."""
    for path in (CHAT, TEXT):
        assert post(stack, path, chat()).status_code == 401
    assert CLIENT.get(f"{stack.gateway.url}/v1/models").status_code == 401
    assert CLIENT.get(f"{stack.gateway.url}/v1/models/fast").status_code == 401


PATHS = ["/v1/../admin", "/V1/models", "//v1/models", "/v1", "/v1/embedding", "/", "/admin",
         "/v1/models/", "/v1/chat/completions/", "/v1/responses", "/%2e%2e/metrics"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_other_path_exists(stack: Stack, key: str, path: str) -> None:
    """404 in the envelope, not a redirect and not a neighbour's page."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.gateway.port, timeout=10)
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    answer = connection.getresponse()
    assert answer.status == 404
    assert json.loads(answer.read())["error"]["code"] == "not_found"
    connection.close()


def test_the_method_must_fit(stack: Stack, key: str) -> None:
    """405 names what the path takes."""
    answer = CLIENT.get(stack.gateway.url + CHAT, headers={"Authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_limit_is_not_read(stack: Stack, key: str, is_chunked: bool) -> None:
    """413, with a true Content-Length and without any."""
    block = b" " * 1_000_000
    content = iter([block] * 12) if is_chunked else block * 12
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    answer = CLIENT.post(stack.gateway.url + CHAT, content=content, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert answer.json()["error"]["message"] == "A body has at most 8 MiB."


def _raw(stack: Stack, data: bytes) -> bytes:
    """What comes back for these bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", stack.gateway.port), timeout=15) as connection:
        try:
            connection.sendall(data)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        except ConnectionError:
            return b""
        return b"".join(parts)


def test_a_huge_head_is_cut(stack: Stack) -> None:
    """A thousand headers, or one of 64 KiB: closed or a 4xx, and the next request works."""
    line = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    many = line + b"".join(b"x-%d: y\r\n" % i for i in range(1000)) + b"\r\n"
    long = line + b"x: " + b"y" * 65536 + b"\r\n\r\n"
    both = line + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    for data in (many, long, both):
        answer = _raw(stack, data)
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert CLIENT.get(f"{stack.gateway.url}/health").status_code == 200


def test_half_a_head_is_given_ten_seconds(stack: Stack) -> None:
    """A client that never finishes its request line and headers loses its connection."""
    answer, seconds = stack.idlers.half_head.result(40)
    assert answer == b""
    assert 8 < seconds < 14


def test_an_unknown_model_and_a_foreign_one_look_the_same(stack: Stack, key: str) -> None:
    """404 with the same words, so that nobody learns what others have."""
    answers = [post(stack, CHAT, chat(model=name), key=key) for name in ("absent", "private")]
    bodies = [
        answer.text.replace(name, "X").replace(answer.headers["x-request-id"], "")
        for answer, name in zip(answers, ("absent", "private"), strict=True)
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert bodies[0] == bodies[1] and '"model_not_found"' in bodies[0]


@pytest.mark.parametrize("code", ["engine_error", "numerical_error"])
def test_what_fails_in_the_engine_is_not_the_clients_fault(code: str) -> None:
    assert status_of(Refused(code, "The engine failed.")) == 500


@pytest.mark.parametrize("code", ["model_cold", "hold_expired"])
def test_a_model_that_is_not_loaded_in_time_is_worth_another_try(code: str) -> None:
    refused = Refused(code, "It loads.", "model", retry_after=7.0)
    assert status_of(refused) == 503 and (b"retry-after", b"7") in headers_of(refused)


@pytest.mark.parametrize("code", ["model_not_ready", "insufficient_quota"])
def test_what_no_waiting_mends_names_no_time_and_is_not_retried(code: str) -> None:
    headers = dict(headers_of(Refused(code, "It fits nowhere.", "model")))
    assert b"retry-after" not in headers and headers[b"x-should-retry"] == b"false"


def test_what_exceeds_a_kv_cache_is_no_status_that_clients_retry() -> None:
    assert status_of(Refused("kv_capacity", "9 KV blocks needed, 8 exist")) == 400


def test_a_known_model_that_takes_too_long_to_load_says_so(client: openai.OpenAI) -> None:
    """503 at once with the expected time to come back, within openai's limit of 120 s."""
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(
            model="cold", messages=HELLO, extra_headers={"X-Latency-Class": "realtime"}
        )
    assert refused.value.status_code == 503 and refused.value.code == "model_cold"
    assert 6 <= float(refused.value.response.headers["retry-after"]) <= 8


def test_a_prompt_too_long_names_the_limit(client: openai.OpenAI) -> None:
    """The words that litellm's fallback looks for."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fast", prompt="x" * 1500)
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in str(refused.value)


def test_null_means_absent_and_harmless_fields_are_ignored(client: openai.OpenAI) -> None:
    """What SDKs send by habit changes nothing."""
    answer = client.chat.completions.create(
        model="fast",
        messages=[{"role": "developer", "content": "Be brief.", "name": "x"}, *HELLO],
        max_completion_tokens=2,
        extra_body={"temperature": None, "stop": None, "tools": [], "stream_options": None}
        | {"best_of": 1, "echo": False, "verbosity": None, "priority": 0},
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        reasoning_effort="low",
    )
    assert answer.usage.completion_tokens == 2
