"""How each refusal looks to an OpenAI client: status, ``type``, headers and the envelope.

Codes are ours and stable; the status decides the exception class that openai-python raises and
whether it retries (408, 409, 429 and 5xx are retried), so a permanent refusal never has one of
those without ``x-should-retry: false``. A model that fits no device, or whose files are damaged,
stays a 503, for its operator to mend: that one has no ``retry-after``.
"""

from typing import Any

import msgspec

from controlplane.application.refused import Refused

Headers = list[tuple[bytes, bytes]]

_STATUS = {
    "invalid_api_key": 401,
    "invalid_token": 401,
    "token_expired": 401,
    "no_org": 403,
    "tenant_suspended": 403,
    "insufficient_scope": 403,
    "model_access_denied": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "upgrade_required": 426,
    "request_timeout": 408,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "unsupported_encoding": 415,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "tenant_queue_full": 429,
    "internal_error": 500,
    "engine_error": 500,
    "numerical_error": 500,
    "stream_corrupt": 500,
    "audit_unavailable": 503,
    "bus_unavailable": 503,
    "continuation_unsupported": 503,
    "engine_lost": 503,
    "hold_expired": 503,
    "model_cold": 503,
    "model_not_ready": 503,
    "overloaded": 503,
    "replica_retired": 503,
    "shutting_down": 503,
}
_TYPE = {403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_NO_RETRY = frozenset({"insufficient_quota"})


def status_of(error: Refused) -> int:
    return _STATUS.get(error.code, 400)


def body_of(error: Refused, request_id: str = "") -> dict[str, Any]:
    """The envelope; the same shape in a response, in a stream and on a websocket."""
    kind = "insufficient_quota" if error.code == "insufficient_quota" else ""
    fields = {
        "message": error.message,
        "type": kind or _TYPE.get(status_of(error), "invalid_request_error"),
        "param": error.param,
        "code": error.code,
    }
    if request_id:
        fields["request_id"] = request_id
    return {"error": fields}


def encode_error(error: Refused, request_id: str) -> bytes:
    return msgspec.json.encode(body_of(error, request_id))


def _is_final(error: Refused) -> bool:
    """The same request will be refused again, whenever it comes."""
    return error.code in _NO_RETRY or (status_of(error) == 503 and error.retry_after is None)


def headers_of(error: Refused) -> Headers:
    """``retry-after`` in whole seconds of 1 to 120: openai-python does not retry beyond that."""
    headers: Headers = []
    if error.retry_after is not None:
        seconds = min(max(error.retry_after, 0.001), 120.0)
        headers.append((b"retry-after", b"%d" % max(1, round(seconds + 0.499))))
        headers.append((b"retry-after-ms", b"%d" % round(seconds * 1000)))
    if _is_final(error):
        headers.append((b"x-should-retry", b"false"))
    if status_of(error) == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
