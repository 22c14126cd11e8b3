"""Each try of each choice on a replica, noted as it ends and put on record with the request.

::

    send to n1   began 10.0                    note(part, "error", "node_lost", 10.2)
    send to n2   began 10.2                    note(part, "ok", "", 11.0)
    the end      attempts_of(parts, at, now)   two attempts, in wall-clock time
"""

from collections.abc import Iterable

from controlplane.application.call import Part, Try
from controlplane.application.ports import Attempt


def attempts_of(parts: Iterable[Part], at: float, now: float) -> tuple[Attempt, ...]:
    """Of all ``parts``; ``at`` (Unix seconds) and ``now`` (monotonic) are the same moment. A try
    that never said its end was cut off at it."""
    return tuple(_attempt(part.index, one, at - now) for part in parts for one in _tries(part, now))


def _tries(part: Part, now: float) -> list[Try]:
    if part.target is not None and len(part.tries) < part.attempt:
        part.note("cancelled", "", now)
    return part.tries


def _attempt(choice: int, one: Try, to_wall: float) -> Attempt:
    return Attempt(
        choice=choice,
        attempt=one.attempt,
        node_id=one.target.node_id,
        replica_id=one.target.replica_id,
        outcome=one.outcome,
        error_code=one.error_code,
        num_cached_tokens=one.num_cached_tokens,
        num_output_tokens=one.num_output_tokens,
        queue_ms=one.queue_ms,
        started_at=one.began + to_wall,
        duration_ms=(one.ended - one.began) * 1000,
    )
