"""JSON as two parsers must never disagree about it: the gateway, the engine, a proxy between.

Refused beside bad syntax: nesting beyond 64 (checked before parsing), duplicate keys, NaN and the
infinities also as ``1e999``, integers of more than 19 digits, lone surrogates and NUL in strings.
Each has a code of its own; a body that is refused is never half used.
"""

import json
import re
from typing import Any

from controlplane.application.serve import Refused

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 19

# A string without an end counts as one up to the end of the body, and nothing is ever tried twice
# (``++``, ``*+``): otherwise a body of escaped quotes is scanned anew from each of them.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)


def parse_object(body: bytes) -> dict[str, Any]:
    """The object in ``body``; raises Refused."""
    value = parse(body)
    if not isinstance(value, dict):
        raise Refused("invalid_type", "The body is a JSON object.")
    return value


def parse(body: bytes) -> Any:
    """The value in ``body`` (UTF-8); raises Refused."""
    _check_depth(body)
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise Refused("invalid_unicode", "The body is not UTF-8.") from error
    except ValueError as error:
        raise Refused("invalid_json", f"The body is not JSON: {error}.") from error
    if b"\\u" in body:
        _check_strings(value)
    return value


def _check_depth(body: bytes) -> None:
    """Exact only where the count of brackets alone does not already show that it is shallow."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKETS.finditer(body):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise Refused("json_too_deep", f"JSON nests at most {MAX_DEPTH} levels.")
        elif token in (b"]", b"}"):
            depth -= 1


def _check_strings(value: Any) -> None:
    """Only an escape can smuggle in a lone surrogate or a NUL: raw ones are no UTF-8 or no JSON."""
    if isinstance(value, str):
        if "\x00" in value:
            raise Refused("invalid_unicode", "A string holds a NUL character.")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("invalid_unicode", "A string holds half a surrogate pair.") from error
    elif isinstance(value, list):
        for item in value:
            _check_strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_strings(key)
            _check_strings(item)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("duplicate_key", "An object has the same key twice.")
    return found


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise Refused("invalid_number", f"An integer has at most {MAX_INTEGER_DIGITS} digits.")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise Refused("invalid_number", "A number is out of range.")
    return number


def _constant(text: str) -> float:
    raise Refused("invalid_number", f"{text} is not JSON.")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_integer,
    parse_float=_float,
    parse_constant=_constant,
)
