"""One generation and everything it has produced, kept compactly so that it can be sent again.

Token ids lie in one array and text in one buffer; of each delta only where it began and ended is
kept. A struct per token would be a million objects for the garbage collector at 256 busy streams.
What is sent again may be cut elsewhere, but never differs::

    record   (0, [5, 9], "Hel")   (2, [7], "lo", stop)
    kept     token_ids 5 9 7      text Hello       starts 0 2     ends 3 5
    since(2)    (2, [7], "lo", stop)
    since(0)    (0, [5, 9, 7], "Hello", stop)

No delta is cut in two, and the end comes with the last tokens: who has part of a generation has
the text of exactly the tokens it has, so that it can be continued from them elsewhere.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from gpuagent.agent.metrics import Served
from gpuagent.wire.messages import Delta, TokenLogprob

RESEND_TOKENS = 256


@dataclass(slots=True)
class Generation:
    """One accepted request and everything it has produced."""

    request_id: str
    gateway: str
    replica_id: str
    attempt: int
    num_prompt_tokens: int
    started_at: float
    record_id: str = ""  # the request on record; "": its own id
    num_cached_tokens: int = 0
    queue_ms: float | None = None
    ended_at: float = 0.0
    last_at: float = 0.0
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    text: bytearray = field(default_factory=bytearray)
    starts: "array[int]" = field(default_factory=lambda: array("I"))  # token index of each delta
    ends: "array[int]" = field(default_factory=lambda: array("Q"))  # length of text after it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    terminal: Delta | None = None
    lease_s: float = 0.0  # 0: none
    tenant: bytes = b""
    served: Served | None = None  # None: it was refused and never reached an engine
    num_sent: int = 0  # of its tokens, sent by the replica that it continues; not their text
    num_computed_tokens: int = 0  # of the inputs that it embeds

    def record(self, delta: Delta) -> None:
        """Keep what ``delta`` adds."""
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text.encode()
        self.starts.append(delta.index)
        self.ends.append(len(self.text))
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = delta.num_cached_tokens
        if self.queue_ms is None and (delta.token_ids or delta.embeddings):
            self.queue_ms = delta.queue_ms
        if delta.embeddings:
            self.num_computed_tokens = self.num_prompt_tokens
        elif delta.num_computed_tokens:
            self.num_computed_tokens = min(delta.num_computed_tokens, self.num_prompt_tokens)
        if delta.finish_reason:
            self.terminal = delta

    def ending(self, reason: str, code: str = "", message: str = "") -> Delta:
        """A terminal delta after what was produced so far."""
        return Delta(
            request_id=self.request_id,
            index=len(self.token_ids),
            token_ids=(),
            text="",
            finish_reason=reason,
            error_code=code,
            error_message=message,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=len(self.token_ids),
        )

    def since(self, index: int) -> Iterator[Delta]:
        """Everything from token ``index`` on, in deltas of about RESEND_TOKENS tokens."""
        total = len(self.token_ids)
        start = min(index, total)
        while start < total:
            end = self._end_of_slice(start)
            yield self._slice(start, end)
            start = end
        if self.terminal and index >= total:
            text = self._text(total, total + 1)
            yield msgspec.structs.replace(
                self.terminal, index=total, token_ids=(), text=text, logprobs=()
            )

    def _end_of_slice(self, start: int) -> int:
        """Where the last delta ends that begins within RESEND_TOKENS tokens."""
        at = bisect_left(self.starts, start + RESEND_TOKENS)
        return self.starts[at] if at < len(self.starts) else len(self.token_ids)

    def _slice(self, start: int, end: int) -> Delta:
        is_last = end == len(self.token_ids)
        first, last = start - self.num_sent, end - self.num_sent
        delta = Delta(
            request_id=self.request_id,
            index=start,
            token_ids=tuple(self.token_ids[start:end]),
            text=self._text(start, end + 1 if is_last else end),
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=end,
            logprobs=tuple(self.logprobs[max(first, 0) : max(last, 0)]),
        )
        return self._ended(delta) if is_last and self.terminal else delta

    def _ended(self, delta: Delta) -> Delta:
        """The last delta of all, with how it ended."""
        assert self.terminal is not None
        return msgspec.structs.replace(
            self.terminal,
            index=delta.index,
            token_ids=delta.token_ids,
            text=delta.text,
            logprobs=delta.logprobs,
        )

    def _text(self, start: int, end: int) -> str:
        """Text of the deltas whose index is in [start, end)."""
        first, last = bisect_left(self.starts, start), bisect_right(self.starts, end - 1)
        begin = self.ends[first - 1] if first else 0
        return self.text[begin : self.ends[last - 1] if last else 0].decode()
