"""What a request costs is what its version cost when the request was admitted."""

import time
from typing import Any

from controlplane.domain import model
from controlplane.domain.money import Price, cost
from tests.openai.ledger import attempts_of, record_of
from tests.openai.stack import Stack, until
from tests.openai.wire import CLIENT, HELLO, post

CHAT = "/v1/chat/completions"
OLD, NEW = Price(150_000, 75_000, 600_000), Price(1, 1, 2)
ASKED = {"model": "ends", "messages": HELLO, "user": "ann"}


def set_price(stack: Stack, name: str, price: Price) -> None:
    command = model.SetModelPrice(name, "v1", price, time.time())
    stack.order(model.DECIDER, f"model-{name}", command)


def ask(stack: Stack, key: str) -> dict[str, Any]:
    answer = post(stack, CHAT, ASKED, key=key)
    assert answer.status_code == 200
    return record_of(stack, answer.headers["x-engine-request-id"])


def due(row: dict[str, Any], price: Price) -> int:
    prompt, cached = row["num_prompt_tokens"], row["num_cached_tokens"]
    return cost(price, prompt, cached, row["num_output_tokens"])


def test_a_change_of_price_touches_no_request_that_runs(stack: Stack, key: str) -> None:
    """It ends at the price it began under; the gateway has the new one within a second."""
    set_price(stack, "slow", OLD)
    until(lambda: ask_slow(stack, key)["price_output"] == OLD.output, 5)
    body = {"model": "slow", "messages": HELLO, "max_tokens": 40, "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    with CLIENT.stream("POST", stack.gateway.url + CHAT, json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        set_price(stack, "slow", NEW)
        until(lambda: ask_slow(stack, key)["price_output"] == NEW.output, 1)
        assert list(lines)
    row = record_of(stack, answer.headers["x-engine-request-id"])
    assert (row["outcome"], row["num_output_tokens"]) == ("ok", 40)
    assert row["price"] == due(row, OLD) > due(row, NEW)


def ask_slow(stack: Stack, key: str) -> dict[str, Any]:
    body = {"model": "slow", "messages": HELLO, "max_tokens": 1}
    return record_of(stack, post(stack, CHAT, body, key=key).headers["x-engine-request-id"])


def test_cached_tokens_cost_their_own_price_and_no_choice_counts_them_twice(
    stack: Stack, key: str
) -> None:
    """The record says as many cached tokens as the answer did."""
    set_price(stack, "ends", OLD)
    until(lambda: ask(stack, key)["price_input"] == OLD.input, 5)
    answer = post(stack, CHAT, ASKED | {"n": 3}, key=key)
    row = record_of(stack, answer.headers["x-engine-request-id"])
    said = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert row["num_cached_tokens"] == said <= row["num_prompt_tokens"]
    assert row["price"] == due(row, OLD) > 0


def test_a_record_names_its_user_and_each_choices_attempt(stack: Stack, key: str) -> None:
    answer = post(stack, CHAT, ASKED | {"n": 2}, key=key)
    request_id = answer.headers["x-engine-request-id"]
    row = record_of(stack, request_id)
    assert row["end_user"] == "ann" and row["subject"] != "ann"
    tries = attempts_of(stack, request_id)
    assert [(one["choice"], one["attempt"], one["outcome"]) for one in tries] == [
        (0, 1, "ok"), (1, 1, "ok")
    ]  # fmt: skip
    assert sum(one["num_output_tokens"] for one in tries) == row["num_output_tokens"]
    assert all(row["at"] - 1 < one["started_at"] < row["ended_at"] for one in tries)
