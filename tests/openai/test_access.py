"""Keys, tenants, rates and budgets: who may, and how much; changes hold within a second."""

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from controlplane.adapters.access.tokens import sign_ticket
from controlplane.domain import tenant
from tests.openai.ledger import requests_of
from tests.openai.stack import Stack, until
from tests.openai.wire import CLIENT, HELLO, post

CHAT = "/v1/chat/completions"
ASKED = {"model": "fast", "messages": HELLO, "max_tokens": 2}


def status(stack: Stack, key: str) -> int:
    return post(stack, CHAT, ASKED, key=key).status_code


def test_a_new_key_works_at_once(stack: Stack) -> None:
    """Also before the log has reached the gateway."""
    assert status(stack, stack.add_tenant("fresh")) == 200


def test_a_revoked_key_is_refused_within_a_second(stack: Stack) -> None:
    """And its neighbour goes on working."""
    first, second = stack.add_tenant("two"), stack.add_key("two")
    assert (status(stack, first), status(stack, second)) == (200, 200)
    stack.revoke("two", first)
    until(lambda: status(stack, first) == 401, 1)
    assert status(stack, second) == 200


def test_a_key_without_the_scope_does_not_infer(stack: Stack) -> None:
    """403: the key is right, its scope is not."""
    stack.add_tenant("readers")
    answer = post(stack, CHAT, ASKED, key=stack.add_key("readers", ("admin:read",)))
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["code"] == "insufficient_scope"
    assert error["message"].startswith("This token may not use any model: its role is 'developer'")


def test_a_suspended_tenant_is_refused_and_its_streams_end(stack: Stack) -> None:
    """New requests 403; a running stream ends with a typed error and DONE."""
    key = stack.add_tenant("naughty")
    with CLIENT.stream(
        "POST",
        stack.gateway.url + CHAT,
        json=ASKED | {"model": "slow", "max_tokens": 2000, "stream": True},
        headers={"Authorization": f"Bearer {key}"},
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        command = tenant.SuspendTenant("naughty", "test", time.time())
        stack.order(tenant.DECIDER, "tenant-naughty", command)
        rest = [line for line in lines if line]
    assert '"tenant_suspended"' in rest[-2] and rest[-1] == "data: [DONE]"
    assert status(stack, key) == 403
    (row,) = requests_of(stack, "naughty")
    assert (row["outcome"], row["error_code"]) == ("error", "tenant_suspended")


def test_a_ticket_is_good_for_http_too(stack: Stack) -> None:
    """The playground's fetch; the subject is on record."""
    ticket = sign_ticket("acme", "user:ann", time.time())
    answer = post(stack, CHAT, ASKED, key=ticket.text)
    assert answer.status_code == 200
    assert "user:ann" in {row["subject"] for row in requests_of(stack, "acme")}


def test_an_empty_budget_is_429_without_retries(stack: Stack) -> None:
    """insufficient_quota with the numbers; openai's client does not try again."""
    key = stack.add_tenant("poor", budget=1)
    with (
        openai.OpenAI(base_url=f"{stack.gateway.url}/v1", api_key=key, max_retries=2) as client,
        pytest.raises(openai.RateLimitError) as refused,
    ):
        client.chat.completions.create(**ASKED)
    assert refused.value.code == "insufficient_quota"
    assert "budget 1, spent 0, reserved 0" in str(refused.value)
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert requests_of(stack, "poor") == []


def test_concurrent_requests_do_not_overrun_a_budget(stack: Stack) -> None:
    """A budget for ten of a hundred at once admits ten, and everything used is on record."""
    prompt = post(stack, CHAT, ASKED, key=stack.keys["acme"]).json()["usage"]["prompt_tokens"]
    body = ASKED | {"model": "slow", "max_tokens": 10}
    key = stack.add_tenant("tight", budget=10 * (prompt + 10))
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: post(stack, CHAT, body, key=key), range(100)))
    codes = [answer.status_code for answer in answers]
    assert (codes.count(200), codes.count(429)) == (10, 90)
    rows = requests_of(stack, "tight")
    assert [row["outcome"] for row in rows] == ["ok"] * 10


def test_a_rate_is_limited_by_tier(stack: Stack) -> None:
    """The free tier's bucket runs dry; the refusal says when to come back."""
    key = stack.add_tenant("small", tier="free")
    answers = [post(stack, CHAT, ASKED, key=key) for _ in range(70)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused[0].headers["retry-after"]) <= 120
    assert refused[0].headers["x-ratelimit-remaining-requests"] == "0"
    assert len(requests_of(stack, "small")) == 70 - len(refused)


def test_a_request_beyond_the_tier_is_told_so(stack: Stack) -> None:
    """Waiting does not help, so it is no 429 that clients would repeat."""
    key = stack.add_tenant("tiny", tier="free")
    answer = post(stack, CHAT, {"model": "slow", "messages": HELLO, "n": 8}, key=key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")


@pytest.mark.parametrize("token", ["bad", "sk_bad", "sk_0123456789ab." + "x" * 43])
def test_every_bad_key_is_refused_in_the_same_clear_words(stack: Stack, token: str) -> None:
    """Also one that does not even look like a key."""
    answer = post(stack, CHAT, ASKED, key=token)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == "Incorrect API key provided."
