"""What each generation produced, kept for whoever has to close the record of a lost gateway.

A gateway that dies takes its counts with it; the node that generated has them to the token. So
they outlive the tokens themselves, which are kept for a minute after the end (``inference``)::

    t=0    gw-a asks for r1; it runs        r1: running, counted as it goes
    t=3    gw-a is killed
    t=18   gw-b asks to close r1            r1 is cancelled, 412 tokens so far
    t=18.1 gw-b asks again                  r1: ended, 413 tokens: what is billed
    t=78   the tokens are dropped           r1: ended, 413 tokens, for 15 minutes more

Of inputs to embed no token comes out, so the tokens of those that were computed are told beside.
An engine tells of them as it ends, also when it is stopped in the middle::

    t=0    gw-a asks for r2: 32 inputs of 10 tokens, 8 in a step
    t=1    gw-a is killed
    t=16   gw-b asks to close r2; it is cancelled after the second step
    t=16.1 gw-b asks again                  r2: ended, 160 tokens computed: what is billed

A record that was asked for is closed for good: a generation of it that arrives later (its gateway
was only paused, or the message was slow) does not start, since nothing could bill it any more.
What is kept is bounded; the oldest goes first. A count of 32,768 ended generations is about 10 MB.
"""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from gpuagent.agent.generation import Generation
from gpuagent.wire.messages import Produced

KEPT_S = 900.0
MAX_KEPT = 32_768
MAX_CLOSED = 65_536


class Tallies:
    """By generation; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running: dict[str, Generation] = {}  # and those that ended a short while ago
        self._ended: dict[str, tuple[float, str, Produced]] = {}  # (ended at, gateway, counts)
        self._sent: dict[str, int] = {}  # of what another replica began: tokens sent by it
        self._computed: dict[str, int] = {}  # of the ended: tokens of inputs embedded
        self._choices: dict[str, set[str]] = {}  # of records with several generations
        self._closed: dict[str, float] = {}  # record -> until when it takes no generation

    def open(self, generation: Generation) -> None:
        """From now on it is known, under its record; a new attempt replaces the one before."""
        self._drop(generation.request_id)
        self._running[generation.request_id] = generation
        if generation.num_sent:
            self._sent[generation.request_id] = generation.num_sent
        if generation.record_id:
            self._choices.setdefault(generation.record_id, set()).add(generation.request_id)

    def shrink(self, generation: Generation) -> None:
        """It is dropped where it was; only its counts stay."""
        if self._running.get(generation.request_id) is not generation:
            return
        del self._running[generation.request_id]
        counts = produced(generation, generation.ended_at)
        self._ended[generation.request_id] = (generation.ended_at, generation.gateway, counts)
        if generation.num_computed_tokens:
            self._computed[generation.request_id] = generation.num_computed_tokens
        if len(self._ended) > MAX_KEPT:
            self._drop(next(iter(self._ended)))

    def close(self, record_id: str) -> None:
        """Take no more generations of the record."""
        self._closed.pop(record_id, None)
        self._closed[record_id] = self._clock() + KEPT_S
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]

    def is_closed(self, record_id: str) -> bool:
        return record_id in self._closed

    def running(self, gateway: str, record_id: str) -> Iterator[Generation]:
        """The record's generations whose end has not come yet."""
        for request_id in self._of(record_id):
            generation = self._running.get(request_id)
            if generation and generation.gateway == gateway and generation.terminal is None:
                yield generation

    def counts(self, gateway: str, record_id: str) -> Iterator[Produced]:
        """Of all the record's generations that ``gateway`` asked for, ended or not."""
        now = self._clock()
        for request_id in self._of(record_id):
            generation = self._running.get(request_id)
            if generation is not None:
                if generation.gateway == gateway:
                    yield produced(generation, now)
                continue
            ended_at, asked_by, counts = self._ended.get(request_id, (0.0, "", None))
            if counts is not None and asked_by == gateway:
                age_s = now - ended_at + counts.ran_s
                yield msgspec.structs.replace(counts, age_s=age_s)

    def sent(self, counts: Iterable[Produced]) -> dict[str, int]:
        """Of those that another replica began, how many of the tokens are its."""
        return {
            c.request_id: self._sent[c.request_id] for c in counts if c.request_id in self._sent
        }

    def computed(self, counts: Iterable[Produced]) -> dict[str, int]:
        """Of those that embed, how many tokens of their inputs were computed."""
        all_of = {c.request_id: self._num_computed(c.request_id) for c in counts}
        return {request_id: number for request_id, number in all_of.items() if number}

    def _num_computed(self, request_id: str) -> int:
        generation = self._running.get(request_id)
        if generation is not None:
            return generation.num_computed_tokens
        return self._computed.get(request_id, 0)

    def forget_old(self) -> None:
        """Call every second."""
        now = self._clock()
        while self._ended and now - self._ended[next(iter(self._ended))][0] > KEPT_S:
            self._drop(next(iter(self._ended)))
        while self._closed and self._closed[next(iter(self._closed))] <= now:
            del self._closed[next(iter(self._closed))]

    def _of(self, record_id: str) -> list[str]:
        return [record_id, *sorted(self._choices.get(record_id, ()))]

    def _drop(self, request_id: str) -> None:
        _, _, counts = self._ended.pop(request_id, (0.0, "", None))
        self._sent.pop(request_id, None)
        self._computed.pop(request_id, None)
        if counts is None or counts.record_id == request_id:
            return
        choices = self._choices.get(counts.record_id, set())
        choices.discard(request_id)
        if not choices:
            self._choices.pop(counts.record_id, None)


def produced(generation: Generation, now: float) -> Produced:
    """Its counts so far."""
    end = generation.terminal
    return Produced(
        record_id=generation.record_id or generation.request_id,
        request_id=generation.request_id,
        attempt=generation.attempt,
        replica_id=generation.replica_id,
        num_output_tokens=len(generation.token_ids),
        num_cached_tokens=generation.num_cached_tokens,
        finish_reason=end.finish_reason if end else "",
        error_code=end.error_code if end else "",
        queue_ms=generation.queue_ms,
        age_s=now - generation.started_at,
        ran_s=(generation.ended_at if end else now) - generation.started_at,
    )
