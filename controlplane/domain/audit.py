"""Refusals: an order that was not carried out is a fact too. Stream ``refusals``."""

from controlplane.domain.decider import Event


class CommandRefused(Event, frozen=True, tag_field="type", tag="CommandRefused"):
    """``target`` is the stream the order was for; no field of the order itself is kept here."""

    command: str
    target: str
    code: str
    detail: str
    at: float
