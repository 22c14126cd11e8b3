"""Prices and amounts of money as integers, so that no total ever rounds.

The unit is a picodollar, 10⁻¹² of a dollar (of a unit of ``ENGINE_CURRENCY``, which only labels).
Prices are quoted in dollars per million tokens, and one of those is a whole number of picodollars
for each token::

    1 USD / 1,000,000 tokens  =  0.000001 USD a token  =  1,000,000 picodollars a token

    a version at   {"input": "0.15", "cached_input": "0.075", "output": "0.60"}
    is stored as   Price(input=150_000, cached_input=75_000, output=600_000)

    1,000 prompt tokens, 400 of them found in the prefix cache, and 50 generated cost
    600 · 150,000 + 400 · 75,000 + 50 · 600,000 = 150,000,000 picodollars = 0.00015 USD

Tokens times price is exact, and so is every sum of such products. Floats were rejected, since
0.1 + 0.2 is not 0.3 and a sum would depend on its order; so were decimals rounded to cents for
each request, since a million requests of 0.00015 USD would cost nothing.

**Sums.** 2⁶³ picodollars are 9.2 million dollars: enough for one request (`MAX_PRICE` times 2³³
tokens), too little for a year of all tenants; and SQLite turns an integer that overflows into a
float without a word. What adds up amounts in a database therefore adds the two parts of `split`,
which can be added up nine billion times::

    split(12_345_678_901) == (12, 345_678_901)      thousandths of a dollar, picodollars
    join(12, 345_678_901) == 12_345_678_901         in Python, where integers have no end
"""

import re

import msgspec

from controlplane.domain.errors import Invalid

MAX_PRICE = 10**9  # 1,000 USD per million tokens
_PICO_PER_MILLI = 10**9
_PICO_DIGITS = 12
_PRICE_DIGITS = 6  # of a price per million tokens: the last one is a picodollar a token
_PRICE = re.compile(r"([0-9]{1,4})(?:\.([0-9]{1,6}))?", re.ASCII)
_AMOUNT = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,12}))?", re.ASCII)


class Price(msgspec.Struct, frozen=True):
    """Picodollars per token: of the prompt, of its part found in a prefix cache, generated."""

    input: int = 0
    cached_input: int = 0
    output: int = 0


FREE = Price()


def check_price(price: Price) -> None:
    """Raise Invalid ``invalid_price`` unless each is in range and the cache saves money.

    A cached token that cost more than a fresh one would make the reservation of a request, all of
    whose prompt is reserved as fresh, too small.
    """
    for name in Price.__struct_fields__:
        if not 0 <= getattr(price, name) <= MAX_PRICE:
            raise Invalid("invalid_price", "A price is from 0 to 1000.", name)
    if price.cached_input > price.input:
        text = "A cached token costs no more than another: cached_input is at most input."
        raise Invalid("invalid_price", text, "cached_input")


def cost(price: Price, num_prompt: int, num_cached: int, num_output: int) -> int:
    """Picodollars of one request; ``num_cached`` of its ``num_prompt`` tokens were cached."""
    cached = min(num_cached, num_prompt)
    fresh = num_prompt - cached
    return fresh * price.input + cached * price.cached_input + num_output * price.output


def split(amount: int) -> tuple[int, int]:
    """``amount`` as (thousandths of a dollar, picodollars), which sum without overflow."""
    return divmod(amount, _PICO_PER_MILLI)


def join(milli: int, pico: int) -> int:
    """The amount of the two parts, or of their sums."""
    return milli * _PICO_PER_MILLI + pico


# --- as people write it -----------------------------------------------------------------------
def parse_prices(input: str, cached_input: str | None, output: str) -> Price:
    """Of three texts per million tokens; without a price of its own a cached token costs as any."""
    return Price(
        parse_price(input, "input"),
        parse_price(input if cached_input is None else cached_input, "cached_input"),
        parse_price(output, "output"),
    )


def price_texts(price: Price) -> dict[str, str]:
    """The three texts per million tokens, by the names of ``Price``."""
    return {name: price_text(getattr(price, name)) for name in Price.__struct_fields__}


def parse_price(text: str, param: str) -> int:
    """``"0.15"`` (USD per million tokens) is 150,000; raises Invalid ``invalid_price``."""
    match = _PRICE.fullmatch(text)
    if match is None:
        raise Invalid(
            "invalid_price",
            'A price is per million tokens: a decimal text like "0.15", with at most 6 decimals.',
            param,
        )
    return int(match[1]) * 10**_PRICE_DIGITS + int((match[2] or "").ljust(_PRICE_DIGITS, "0"))


def parse_amount(text: str, param: str) -> int:
    """``"12.50"`` dollars in picodollars; raises Invalid ``invalid_amount``."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        text = 'An amount is a text like "12.50": at most 15 digits, and 12 decimals.'
        raise Invalid("invalid_amount", text, param)
    return int(match[1]) * 10**_PICO_DIGITS + int((match[2] or "").ljust(_PICO_DIGITS, "0"))


def price_text(per_token: int) -> str:
    """The price per million tokens: ``price_text(150_000) == "0.15"``."""
    return _decimal(per_token, _PRICE_DIGITS)


def amount_text(amount: int) -> str:
    """Dollars: ``amount_text(150_000_000) == "0.00015"``; exact, so of up to 12 decimals."""
    return _decimal(amount, _PICO_DIGITS)


def _decimal(value: int, digits: int) -> str:
    whole, rest = divmod(value, 10**digits)
    decimals = str(rest).rjust(digits, "0").rstrip("0")
    return f"{whole}.{decimals}" if decimals else str(whole)
