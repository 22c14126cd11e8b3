"""The shape every aggregate has: ``decide(state, command) -> events``, ``evolve(state, event)``.

Worked example, for a route::

    state = fold(route.DECIDER, [RouteCreated(...)])
    route.decide(state, ChangeArms(...))   # -> [RouteArmsChanged(...)], or [] if already so

``decide`` raises DomainError for an order that should never have been sent, and returns no event
when the wish is already true, which makes a resend harmless. ``evolve`` never raises.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

import msgspec

S = TypeVar("S")


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all domain events: past-tense facts, plain data, immutable."""


class State(msgspec.Struct, frozen=True, gc=False):
    """Base of what aggregates remember; ``msgspec.structs.replace`` makes the next one.

    Structs, since a replay makes one an event: with dataclasses that was two thirds of its time.
    """


class Command(msgspec.Struct, frozen=True):
    """Base of all orders; each carries its own ``now`` (Unix seconds, UTC)."""


@dataclass(frozen=True)
class Decider(Generic[S]):
    """One aggregate type: its stream category, empty state and two pure functions."""

    category: str
    initial: S
    decide: Callable[[S, Any], Sequence[Event]]
    evolve: Callable[[S, Any], S]

    def stream(self, target: str) -> str:
        """The stream of the aggregate ``target``: ``model.DECIDER.stream("m") == "model-m"``."""
        return f"{self.category}-{target}"


def fold(decider: Decider[S], events: Iterable[Event], state: S | None = None) -> S:
    """The state after ``events``, from ``state`` or from the beginning."""
    return reduce(decider.evolve, events, decider.initial if state is None else state)
