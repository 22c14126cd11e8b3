"""JSON in, strictly: what two parsers could read differently is refused, not guessed.

Refused: nesting beyond 64 (found by a scan before parsing, since the parser itself recurses),
duplicate keys, NaN and infinities (``1e999`` too), endless integers, lone surrogates and NUL.

    parse(b'{"a": 1, "a": 2}')  # BadJson: duplicate_key
    parse(b"[" * 20_000)  # BadJson: json_too_deep, without recursion
"""

import json
import math
import re
from typing import Any

MAX_DEPTH = 64
MAX_DIGITS = 100

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class BadJson(ValueError):
    """``code`` is one of the stable codes of the module; ``detail`` is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def parse(body: bytes) -> Any:
    """The value that ``body`` (UTF-8) stands for; raises BadJson."""
    _check_depth(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise BadJson("invalid_unicode", "The body is not UTF-8.") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
    except json.JSONDecodeError as error:
        raise BadJson("invalid_json", f"{error.msg} at character {error.pos}.") from None
    check_text(value)
    return value


def check_text(value: Any) -> None:
    """Raise BadJson ``invalid_unicode`` if a string anywhere in ``value`` cannot be stored."""
    if isinstance(value, str):
        if _UNSTORABLE.search(value):
            raise BadJson("invalid_unicode", "Strings hold no NUL and no lone surrogate.")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key)
            check_text(item)
    elif isinstance(value, list):
        for item in value:
            check_text(item)


def _check_depth(body: bytes) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub(b"", body)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise BadJson("json_too_deep", f"At most {MAX_DEPTH} levels of nesting.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise BadJson("duplicate_key", "An object names the same key twice.")
    return result


def _constant(name: str) -> Any:
    raise BadJson("invalid_number", f"{name} is not a JSON number.")


def _float(text: str) -> float:
    value = float(text) if len(text) <= MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise BadJson("invalid_number", "A number is out of range.")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BadJson("invalid_number", "A number is out of range.")
    return int(text)
