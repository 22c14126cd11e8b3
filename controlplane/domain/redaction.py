"""Secrets that people paste where they do not belong, taken out before anything is kept.

::

    redacted("leaked sk_0123456789ab.c2VjcmV0LXRleHQ by mail") == "leaked [secret] by mail"

It knows the forms that are handed out here (API keys, tickets) and JWTs; a password has no form.
"""

import re
from typing import Any

_SECRET = re.compile(
    r"sk_[0-9a-f]{12}\.[A-Za-z0-9_-]{8,}|tkt_[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*\.?[A-Za-z0-9_-]*"
)


def redacted(text: str) -> str:
    """``text`` without keys, tickets and JWTs."""
    return _SECRET.sub("[secret]", text)


def redacted_all(value: Any) -> Any:
    """The same for every text within JSON-like data, names of fields included."""
    match value:
        case str():
            return redacted(value)
        case dict():
            return {redacted_all(name): redacted_all(one) for name, one in value.items()}
        case list() | tuple():
            return [redacted_all(one) for one in value]
    return value
