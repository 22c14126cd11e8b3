"""Recorded choices of replicas as they lie in the ledger, read by their request."""

from collections.abc import Iterator

from controlplane.adapters.ledger.models import Dispatch as Row
from controlplane.adapters.ledger.models import InferenceRequest
from controlplane.dispatch.record import Dispatch, decode

BATCH = 200


def dispatches_at(position: int) -> list[Dispatch]:
    """Of the request whose terminal record is there, by choice and attempt."""
    rows = Row.objects.filter(position=position).order_by("pk").values_list("data", flat=True)
    return sorted(map(decode, rows), key=lambda one: (one.choice, one.attempt))


def of_request(request_id: str) -> list[Dispatch] | None:
    """None if there is no such request."""
    row = InferenceRequest.objects.filter(request_id=request_id).first()
    if row is None:
        return None
    return [] if row.position is None else dispatches_at(row.position)


def every() -> Iterator[tuple[str, Dispatch]]:
    """All that are stored, with their requests' ids."""
    last = 0
    while rows := list(Row.objects.filter(pk__gt=last).order_by("pk")[:BATCH]):
        for row in rows:
            yield row.request_id, decode(row.data)
        last = rows[-1].pk
