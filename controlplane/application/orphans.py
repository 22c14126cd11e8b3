"""Requests whose gateway is gone, and the records that end them.

Billed is what the engine generated and sent, token by token, whether or not the gateway lived long
enough to pass the last of it on: a node cannot know what a client saw, and the prompt and the steps
were computed. So the nodes' own counts decide, and where no node can tell, the number that the
gateway last noted for the request (every two seconds)::

    noted    nodes say               billed   error_code
    180      n1: 231, ended          231      gateway_lost
    0        none of them knows it     0      gateway_lost              never sent, or not counted
    180      n1 does not answer      180      gateway_lost_unconfirmed  after PATIENCE_S
    180      none of them knows it   180      gateway_lost_unconfirmed  the agent was restarted

Inputs to embed bring no token: billed is what was computed of them, as of a client that has left::

    reserved 320 of 32 inputs    n1: 160 computed, cancelled    160 prompt tokens  gateway_lost

Of a choice that was tried on several replicas the last try counts, as while its gateway lived: it
goes on from the tokens that the client had been sent, and counts them. Cached prompt tokens are
those of the first choice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from controlplane.application.ports import Attempt, Terminal

CONFIRMED, UNCONFIRMED = "gateway_lost", "gateway_lost_unconfirmed"
PATIENCE_S = 25.0  # with a silence of 15 s and a beat of 5 s every orphan ends within a minute
_OUTCOMES = {"error": "error", "cancelled": "cancelled"}  # of an attempt; all else is ok


class Orphan(NamedTuple):
    """A live row of a gateway that is gone; ``began`` is in Unix seconds."""

    request_id: str
    gateway: str
    num_noted_tokens: int
    num_prompt_tokens: int
    max_output_tokens: int
    began: float


@dataclass(frozen=True, slots=True)
class Produced:
    """One generation as its node counted it; ``finish_reason`` is "" while it runs.

    ``choice`` is -1 where it is the request's only one.
    """

    node_id: str
    choice: int
    attempt: int
    replica_id: str
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: str
    error_code: str
    queue_ms: float | None
    age_s: float
    ran_s: float
    num_sent_tokens: int = 0  # of its tokens, an earlier try's
    num_computed_tokens: int = 0  # of the inputs that it embeds


@dataclass(frozen=True, slots=True)
class Answers:
    """``produced`` by request; ``is_complete``: every node answered, and nothing runs any more."""

    produced: dict[str, list[Produced]] = field(default_factory=dict)
    is_complete: bool = True


class Nodes(Protocol):
    """All nodes, asked at once."""

    async def close(self, gateway: str, request_ids: Sequence[str]) -> Answers:
        """End these requests of ``gateway`` on every node, for good, and say what they produced.

        Never raises: what could not be asked makes the answer incomplete.
        """


def end_of(orphan: Orphan, produced: Iterable[Produced], is_complete: bool, at: float) -> Terminal:
    """The record that ends ``orphan``; ``at`` in Unix seconds."""
    tries = sorted(produced, key=lambda one: (one.choice, one.attempt, one.node_id))
    last = list({one.choice: one for one in tries}.values())
    counted = sum(one.num_output_tokens for one in last)
    tokens = min(max(counted, orphan.num_noted_tokens), orphan.max_output_tokens)  # as reserved
    computed = sum(one.num_computed_tokens for one in last)
    prompt = orphan.num_prompt_tokens if tokens else min(computed, orphan.num_prompt_tokens)
    queue = [one.queue_ms for one in last if one.queue_ms is not None]
    is_counted = tokens == counted and computed <= orphan.num_prompt_tokens
    is_confirmed = is_counted and (is_complete or is_certain(last))
    return Terminal(
        request_id=orphan.request_id,
        outcome="unknown",
        finish_reason="",
        error_code=CONFIRMED if is_confirmed else UNCONFIRMED,
        node_id=last[0].node_id if last else "",
        replica_id=last[0].replica_id if last else "",
        num_prompt_tokens=prompt,
        num_cached_tokens=min(last[0].num_cached_tokens, orphan.num_prompt_tokens)
        if last and counted
        else 0,
        num_output_tokens=tokens,
        ttft_ms=None,
        queue_ms=min(queue) if queue else None,
        duration_ms=max(0.0, at - orphan.began) * 1000,
        at=at,
        attempts=max((one.attempt for one in tries), default=1),
        tries=tuple(_attempt(one, at) for one in tries),
    )


def is_certain(produced: Sequence[Produced]) -> bool:
    """One choice that has ended with a token, or an input's vector, and was not lost, so that it
    was not continued: no other node can have more of this request."""
    return (
        len(produced) == 1
        and produced[0].choice < 0
        and produced[0].num_output_tokens + produced[0].num_computed_tokens > 0
        and produced[0].finish_reason not in ("", "error")
    )


def _attempt(one: Produced, at: float) -> Attempt:
    return Attempt(
        choice=max(one.choice, 0),
        attempt=one.attempt,
        node_id=one.node_id,
        replica_id=one.replica_id,
        outcome=_OUTCOMES.get(one.finish_reason, "ok"),
        error_code=one.error_code,
        num_cached_tokens=one.num_cached_tokens,
        num_output_tokens=max(one.num_output_tokens - one.num_sent_tokens, 0),
        queue_ms=one.queue_ms,
        started_at=at - one.age_s,
        duration_ms=one.ran_s * 1000,
    )
