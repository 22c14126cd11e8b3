"""What one choice of a replica saw and what came of it, kept so that it can be made again.

A record holds the inputs (replicas as their nodes' telemetry had them, with its age; the request;
the weights in force; the log position of placement and configuration) and the outcome with every
candidate's terms. ``choose`` is pure, so the same inputs must give the same bits::

    req-7, choice 0, attempt 1, at position 812, weights alpha 1.0 ...
    saw     r1 (n1, heard 0.4 s ago, utilization 0.5, 3 waiting, ...), r2 (n2, ..., 83.5 C)
    chose   r1: queue 0.3 + prefill 0.1 + decode 0.2 s, cost 0.85; not r2: too_hot
    again   explain(saw) == (r1, ...)              differences: none

Which requests have records: a share of all, by a hash of the request's id, so that every gateway
and every attempt of one request agrees without asking; and, whatever their ids are, attempts that
follow a lost or refused one, requests that no replica took, and a few a second of all others
(``application.explaining``)::

    share 0.01    blake2b("req-7") = 0.0042... of 2^64    kept, "sampled"
                  blake2b("req-8") = 0.73...              kept if attempt > 1, refused or "spare"
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from controlplane.dispatch.choose import (
    Choice,
    Explanation,
    NoReplica,
    ReplicaView,
    RequestView,
    choose,
)
from controlplane.domain.routing import Weights

FORMULA = 1  # raised with whatever changes what the same inputs give
SAMPLED, FOLLOWED, REFUSED, SPARE = "sampled", "followed", "refused", "spare"
MAX_DIFFERENCES = 100


class Dispatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One choice. ``at`` is in Unix seconds, ``position`` the log's; ``why`` it was kept is sampled
    | followed (the attempt follows another one) | refused (no replica took the request) | spare
    (the gateway had little to write)."""

    formula: int = FORMULA
    choice: int
    attempt: int
    at: float
    why: str
    position: int
    weights: Weights
    request: RequestView
    excluded: tuple[str, ...] = ()
    replicas: tuple[ReplicaView, ...]
    outcome: Explanation


class Difference(msgspec.Struct, frozen=True):
    """``path`` as in ``outcome.candidates[0].cost``; None where one side has nothing."""

    path: str
    stored: Any
    recomputed: Any


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request of this id is explained, of which ``share`` (0 to 1) are."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2.0**64


def dispatch_of(
    choice: Choice, number: int, attempt: int, at: float, why: str, position: int
) -> Dispatch:
    """``number`` is that of the request's choice (``n``) which the attempt is for."""
    return Dispatch(
        choice=number,
        attempt=attempt,
        at=at,
        why=why,
        position=position,
        weights=choice.weights,
        request=choice.request,
        excluded=tuple(sorted(choice.excluded)),
        replicas=tuple(choice.views),
        outcome=choice.explain(),
    )


_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Dispatch)


def encode(dispatch: Dispatch) -> bytes:
    """JSON, in which every float is read back to the bit."""
    return _encoder.encode(dispatch)


def decode(data: bytes | str) -> Dispatch:
    """Raises msgspec.ValidationError of what is no record."""
    return _decoder.decode(data)


# --- made again -------------------------------------------------------------------------------
def recompute(stored: Dispatch) -> tuple[Difference, ...]:
    """Choose again from the recorded inputs; what differs, at most ``MAX_DIFFERENCES``, bit for
    bit: nothing does unless the record was changed or ``formula`` is another release's."""
    made = _again(stored)
    outcome = made.explain()
    again = msgspec.structs.replace(stored, outcome=outcome)
    found: list[Difference] = []
    if (made.replica_id, made.node_id) != (outcome.replica_id, outcome.node_id):
        found.append(Difference("winner", outcome.replica_id, made.replica_id))
    if encode(again) != encode(stored):
        pair = (msgspec.to_builtins(one.outcome) for one in (stored, again))
        found += _compare("outcome", *pair)
    return tuple(found[:MAX_DIFFERENCES])


def _again(stored: Dispatch) -> Choice:
    excluded = frozenset(stored.excluded)
    try:
        return choose(stored.replicas, stored.request, stored.weights, excluded)
    except NoReplica as none:
        return none.choice


def _compare(path: str, stored: Any, again: Any) -> Iterator[Difference]:
    """Leaf by leaf, as deep as both have the same shape."""
    if isinstance(stored, dict) and isinstance(again, dict):
        for name in {**stored, **again}:
            yield from _compare(f"{path}.{name}", stored.get(name), again.get(name))
    elif isinstance(stored, (list, tuple)) and isinstance(again, (list, tuple)):
        for index in range(max(len(stored), len(again))):
            one, other = (side[index] if index < len(side) else None for side in (stored, again))
            yield from _compare(f"{path}[{index}]", one, other)
    elif stored != again:
        yield Difference(path, stored, again)
