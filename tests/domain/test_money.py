"""Prices and amounts are exact, whatever is multiplied, added up or written as text."""

import random
from decimal import Decimal

import pytest

from controlplane.domain.errors import Invalid
from controlplane.domain.money import (
    MAX_PRICE,
    Price,
    amount_text,
    check_price,
    cost,
    join,
    parse_price,
    parse_prices,
    price_text,
    price_texts,
    split,
)

PRICE = Price(input=150_000, cached_input=75_000, output=600_000)


def test_the_docstrings_example_costs_what_it_says() -> None:
    assert parse_prices("0.15", "0.075", "0.60") == PRICE
    assert cost(PRICE, 1000, 400, 50) == 150_000_000
    assert amount_text(150_000_000) == "0.00015"


def test_no_more_tokens_are_cached_than_the_prompt_has() -> None:
    """A node that miscounts can neither make a request free nor its cost negative."""
    assert cost(PRICE, 10, 700, 0) == cost(PRICE, 10, 10, 0) == 750_000
    assert cost(PRICE, 0, 5, 0) == 0


@pytest.mark.parametrize(
    ("text", "per_token"),
    [("0", 0), ("0.000001", 1), ("0.15", 150_000), ("15", 15_000_000), ("1000", MAX_PRICE),
     ("0.150000", 150_000), ("007.5", 7_500_000)],
)  # fmt: skip
def test_a_price_is_read_exactly(text: str, per_token: int) -> None:
    assert parse_price(text, "input") == per_token
    assert Decimal(price_text(per_token)) == Decimal(text)


@pytest.mark.parametrize(
    "text", ["", ".5", "1.", "-1", "+1", "1e3", "0.0000001", "١", "1,5", " 1", "NaN", "12345"]
)
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_price(text, "output")
    assert (refused.value.code, refused.value.param) == ("invalid_price", "output")


@pytest.mark.parametrize(
    ("price", "param"),
    [(Price(MAX_PRICE + 1, 0, 0), "input"), (Price(0, 0, -1), "output"),
     (Price(5, 6, 0), "cached_input")],
)  # fmt: skip
def test_a_price_out_of_range_or_a_dearer_cache_is_refused(price: Price, param: str) -> None:
    with pytest.raises(Invalid) as refused:
        check_price(price)
    assert (refused.value.code, refused.value.param) == ("invalid_price", param)


def test_texts_give_the_same_price_again() -> None:
    choose = random.Random(1)
    for _ in range(200):
        price = Price(*(choose.randint(0, MAX_PRICE) for _ in range(3)))
        assert parse_prices(**price_texts(price)) == price
    assert parse_prices("2", None, "3") == Price(2_000_000, 2_000_000, 3_000_000)


def test_amounts_of_any_size_are_whole_after_split_and_sum() -> None:
    """Both sums of a billion of the dearest requests fit 64 bits; the amount alone would not."""
    dearest = cost(Price(MAX_PRICE, 0, MAX_PRICE), 2**32, 0, 2**32)
    assert dearest < 2**63
    milli, pico = split(dearest)
    assert join(milli, pico) == dearest
    assert max(milli, pico) * 10**9 < 2**63 < dearest * 10**9
    amounts = [random.Random(i).randint(0, dearest) for i in range(1000)]
    parts = [split(amount) for amount in amounts]
    assert join(sum(m for m, _ in parts), sum(p for _, p in parts)) == sum(amounts)
