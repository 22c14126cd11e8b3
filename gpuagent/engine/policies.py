"""When requests join, and what comes first in a step. A policy only orders three moves:

    decode    the running requests that miss one token
    prefill   the running requests that miss more of their prompt
    admit     waiting requests take slots, blocks and what is left of the budget

Example: "a" decodes, "b" has half its prompt computed, "c" waits, one slot and budget are free:

    continuous      a 1 token, b the rest of its prompt, c begins
    static          b the rest of its prompt; c joins if a has had its first token only, and
                    otherwise waits until a and b have ended
    prefill-first   b the rest of its prompt, c begins; a waits until no prompt is left

`continuous` never stalls decoding. `static` is the papers' baseline: prompts are computed until
all slots have been taken or nobody waits, then all members decode until the last has ended
(those that have ended cost nothing, which is kinder than a padded batch). `prefill-first` gives
the shortest TTFT and the fullest batch, and stalls everybody's tokens while prompts arrive; it
is for document processing, where nobody watches the tokens.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol


class Policy(StrEnum):
    """The policies by name."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    PREFILL_FIRST = "prefill-first"


class Planner(Protocol):
    """What a policy may do with the step being planned."""

    @property
    def is_forming(self) -> bool:
        """True while a batch takes members: fewer have joined than there are slots, and nobody
        has decoded yet."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is planned yet."""

    def decode(self) -> None:
        """One token for each running request that decodes."""

    def prefill(self) -> None:
        """More of the prompts of running requests."""

    def admit(self) -> None:
        """Let waiting requests start."""


def continuous(step: Planner) -> None:
    """Join at any step, decode first."""
    step.decode()
    step.prefill()
    step.admit()


def static(step: Planner) -> None:
    """Nobody joins until all members of a batch have ended."""
    step.prefill()
    if step.is_forming:
        step.admit()
    if step.is_empty:
        step.decode()


def prefill_first(step: Planner) -> None:
    """Decode only when no prompt is left that could be computed."""
    step.prefill()
    step.admit()
    if step.is_empty:
        step.decode()


PLANS: dict[Policy, Callable[[Planner], None]] = {
    Policy.CONTINUOUS: continuous,
    Policy.STATIC: static,
    Policy.PREFILL_FIRST: prefill_first,
}
