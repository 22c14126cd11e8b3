"""The strict parser agrees with the lenient one wherever it does not refuse."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.application.strict_json import MAX_DEPTH, BadJson, parse

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)  # fmt: skip


@given(VALUES, st.booleans())
def test_lawful_json_is_read_as_json_loads_reads_it(value: Any, is_ascii: bool) -> None:
    """Escaped or not, nested or flat."""
    assert parse(json.dumps(value, ensure_ascii=is_ascii).encode()) == value


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_the_limit_of_depth_is_exact(depth: int) -> None:
    """64 levels pass, 65 do not, whatever stands beside them."""
    body = b"[" * depth + b"]" * depth
    if depth <= MAX_DEPTH:
        parse(body)
        parse(b'["[[[", ' * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH)
    else:
        with pytest.raises(BadJson) as refused:
            parse(body)
        assert refused.value.code == "json_too_deep"


def test_wide_is_not_deep() -> None:
    """A thousand shallow objects are fine, and brackets in strings do not count."""
    parse(json.dumps([{"a": [1]}] * 1000).encode())
    parse(json.dumps(["[" * 500, '\\"[{' * 100]).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    """Never another exception."""
    try:
        parse(body)
    except BadJson as refused:
        assert refused.code


def test_depth_is_found_in_one_pass() -> None:
    """A megabyte of escaped quotes takes no longer than a megabyte of anything else."""
    began = time.monotonic()
    for end in (b"", b"\\", b'"'):
        with pytest.raises(BadJson):
            parse(b'{"a":"' + b'\\"' * 500_000 + b"[" * 70 + end)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"a": 1', "invalid_json"),
        (b'{"a": 1, "a": 2}', "duplicate_key"),
        (b"[NaN]", "invalid_number"),
        (b"[1e999]", "invalid_number"),
        (b"[-" + b"9" * 20 + b"]", "invalid_number"),
        (b'["\\ud800"]', "invalid_unicode"),
        (b'{"\\u0000": 1}', "invalid_unicode"),
        (b'["\xff"]', "invalid_unicode"),
    ],
)
def test_each_refusal_has_its_code(body: bytes, code: str) -> None:
    """Whatever the surface makes of it."""
    with pytest.raises(BadJson) as refused:
        parse(body)
    assert refused.value.code == code
