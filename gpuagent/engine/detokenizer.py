"""Tokens to text as they come, holding back what may still change.

A character may take several tokens, and a tokenizer's decoder may treat a text's first token
differently, so each new token is decoded together with the few before it and only what is
added is delivered. While the text ends in an incomplete character nothing is. Example, the
three bytes of the euro sign as one token each:

    push(226) -> ""      push(130) -> ""      push(172) -> "€"

A stop string may begin in one token and end in another, so a tail that could become one is
held too. With stop "END":

    push("the E") -> "the "    push("N") -> ""    push("ding") -> "ENding"
    push(" E") -> " "          push("ND.") -> "", and `stopped` is True: the text is cut there
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from gpuagent.models.errors import LoadError

MAX_TOKENIZER_BYTES = 64 << 20

CONTEXT = 5  # tokens of the prompt's end to start from
MAX_CHARACTER = 4  # tokens of the longest character, which has 4 bytes in UTF-8
MAX_HELD = 32  # broken bytes without a clean end are released after so many tokens
REPLACEMENT = "\ufffd"


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """A model folder's tokenizer; LoadError `tokenizer_rejected` if it does not fit the model."""
    path = folder / "tokenizer.json"
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise LoadError("tokenizer_rejected", f"larger than {MAX_TOKENIZER_BYTES} bytes")
        tokenizer = Tokenizer.from_file(str(path))
    except LoadError:
        raise
    except Exception as error:  # the library raises plain Exception for a file it cannot read
        raise LoadError("tokenizer_rejected", str(error)[:300]) from error
    if max(tokenizer.get_vocab().values(), default=0) >= vocab_size:
        raise LoadError("tokenizer_rejected", f"a token id is not below {vocab_size}")
    return tokenizer


class Detokenizer:
    """The text of one request's output tokens; `stopped` once a stop string has appeared."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt[-CONTEXT:])
        self._prefix = self._decode(self._window)
        self._num_settled = len(self._window)
        self._stop = stop
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that can be delivered now that `token` has come."""
        if self.stopped:
            return ""
        self._window.append(token)
        self._settle(len(self._window) - self._num_open())
        return self._release(self._holdback())

    def finish(self) -> str:
        """Whatever is held back, when no more tokens come."""
        if self.stopped:
            return ""
        self._settle(len(self._window))
        return self._release(0)

    def token_text(self, token: int) -> str:
        """A token by itself, for a list of log probabilities."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def _num_open(self) -> int:
        """How many tokens at the end belong to a character that is not complete.

        A decoder writes one replacement character for a whole incomplete one, so if the text
        is that of all but the last few tokens plus one such character, only those are open.
        """
        text, num_held = self._decode(self._window), len(self._window) - self._num_settled
        if not text.endswith(REPLACEMENT):
            return 0
        if num_held < MAX_CHARACTER:
            return num_held
        for size in range(1, MAX_CHARACTER):
            if self._decode(self._window[:-size]) + REPLACEMENT == text:
                return size
        return num_held if num_held <= MAX_HELD else 0

    def _settle(self, end: int) -> None:
        """Move the text up to the window's token `end` to what may be delivered."""
        if end > self._num_settled:
            self._pending += self._decode(self._window[:end])[len(self._prefix) :]
            self._window = self._window[self._num_settled :]
            self._num_settled = end - self._num_settled
            self._prefix = self._decode(self._window[: self._num_settled])

    def _release(self, num_held: int) -> str:
        if cut := self._cut():
            self.stopped = True
            text, self._pending = self._pending[: cut - 1], ""
            return text
        split = len(self._pending) - num_held
        text, self._pending = self._pending[:split], self._pending[split:]
        return text

    def _cut(self) -> int:
        """One plus where the earliest stop string begins; 0 if there is none."""
        found = [self._pending.find(stop) for stop in self._stop]
        return min((at + 1 for at in found if at >= 0), default=0)

    def _holdback(self) -> int:
        """Length of the longest end of the text that may be the start of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-size:]) for stop in self._stop):
                return size
        return 0

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
