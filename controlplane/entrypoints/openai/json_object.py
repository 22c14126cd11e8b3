"""The JSON objects that clients send: strictly parsed, refused in this surface's envelope."""

from typing import Any

from controlplane.application import strict_json
from controlplane.application.refused import Refused


def parse_object(body: bytes) -> dict[str, Any]:
    """The object in ``body``; raises Refused."""
    try:
        value = strict_json.parse(body)
    except strict_json.BadJson as error:
        raise Refused(error.code, error.detail) from error
    if not isinstance(value, dict):
        raise Refused("invalid_type", "The body is a JSON object.")
    return value
