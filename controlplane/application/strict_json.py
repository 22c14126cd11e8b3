"""JSON as two parsers must never disagree about it: what could be read in two ways is refused.

Refused beside bad syntax: nesting beyond 64 (found by a scan before parsing, since the parser
itself recurses), duplicate keys, NaN and the infinities also as ``1e999``, integers of more than
19 digits, lone surrogates and NUL in strings. Each has a code of its own, which every surface
puts into its own envelope; a body that is refused is never half used.

    parse(b'{"a": 1, "a": 2}')  # BadJson: duplicate_key
    parse(b"[" * 20_000)  # BadJson: json_too_deep, without recursion
"""

import json
import re
from typing import Any

MAX_DEPTH = 64
MAX_INTEGER_DIGITS = 19

# A string without an end counts as one up to the end of the body, and nothing is ever tried twice
# (``++``, ``*+``): otherwise a body of escaped quotes is scanned anew from each of them.
_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class BadJson(ValueError):
    """``code`` is stable: invalid_json, json_too_deep, duplicate_key, invalid_number or
    invalid_unicode; ``detail`` is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def parse(body: bytes) -> Any:
    """The value that ``body`` (UTF-8) stands for; raises BadJson."""
    _check_depth(body)
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise BadJson("invalid_unicode", "The body is not UTF-8.") from error
    except json.JSONDecodeError as error:
        raise BadJson("invalid_json", f"The body is not JSON: {error}.") from error
    if b"\\u" in body:  # only an escape can smuggle such a character in: raw, it is no JSON
        check_text(value)
    return value


def check_text(value: Any) -> None:
    """Raise BadJson ``invalid_unicode`` if a string anywhere in ``value`` cannot be stored."""
    if isinstance(value, str):
        if _UNSTORABLE.search(value):
            raise BadJson("invalid_unicode", "Strings hold no NUL and no lone surrogate.")
    elif isinstance(value, list):
        for item in value:
            check_text(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key)
            check_text(item)


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
                raise BadJson("json_too_deep", f"At most {MAX_DEPTH} levels of nesting.")
        elif token in (b"]", b"}"):
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BadJson("duplicate_key", "An object names the same key twice.")
    return found


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise BadJson("invalid_number", f"An integer has at most {MAX_INTEGER_DIGITS} digits.")
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadJson("invalid_number", "A number is out of range.")
    return number


def _constant(text: str) -> float:
    raise BadJson("invalid_number", f"{text} is not JSON.")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_integer,
    parse_float=_float,
    parse_constant=_constant,
)
