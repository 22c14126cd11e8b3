"""How much of a prompt each replica has cached, by what its node says of its prefix cache.

Nodes report a filter of their cached blocks' keys (``gpuagent.engine.prefix_filter``); here the
prompt's keys are computed, one after the other, for as long as any replica has them. Block i of a
prompt has the key ::

    key(i) = SHA-256(key(i - 1) + its tokens, 8 bytes each),   key(-1) = SHA-256(the tenant's salt)

so nobody's prompt is found in what another tenant left. Example, blocks of 4 tokens, prompt of 10::

    key(0)   r1 has it, r2 has it, r3 not
    key(1)   r1 has it, r2 not
    (two tokens are no full block)                    r1: 8 tokens, r2: 4, r3: 0

The last token of a prompt is always computed. Decided: reports of the nodes, instead of a record of
what this gateway sent where: they are right in every gateway and after its restart, and they end
with what they are about, since each replaces the last and a node not heard is ruled out anyway. A
report is up to two seconds old, though, and a program may take its next turn sooner; so what this
gateway sent is known too, for a moment (``Sent``)::

    t = 0.0   prompt P goes to r1                       Sent: P -> r1, until 4.0
    t = 0.8   prompt P + reply + question               r1 has len(P), whatever its last report says
    t = 4.0   forgotten; r1's reports know by now what is left of it

That takes no hash: one prompt begins with the other. It costs a request a copy of its tokens.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

SENT_S = 4.0  # two reports
MAX_SENT = 1024  # prompts
HEAD_TOKENS = 32  # by which prompts that may belong together are found
MAX_ALIKE = 16  # of them


class Prompt(NamedTuple):
    """``data`` holds the tokens, 8 bytes each."""

    salt: bytes
    data: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.data) // 8


class Cache(NamedTuple):
    """A replica's, as reported; ``mask`` is its number of bits less one."""

    replica_id: str
    bits: bytes
    mask: int
    block_size: int


def cache_of(replica_id: str, bits: bytes, block_size: int) -> Cache | None:
    """None of what is no filter (a power of two of bits, at least 8), as of nothing cached."""
    size = len(bits)
    return (
        None if size & (size - 1) or not size else Cache(replica_id, bits, 8 * size - 1, block_size)
    )


def prompt_of(salt: bytes, tokens: Sequence[int]) -> Prompt:
    return Prompt(salt, array("Q", tokens).tobytes())


def keys_of(prompt: Prompt, block_size: int) -> Iterator[bytes]:
    """Of its full blocks, in order; each is computed when it is asked for."""
    data, width = prompt.data, 8 * block_size
    key = sha256(prompt.salt).digest()
    for start in range(0, len(data) - width + 1, width):
        key = sha256(key + data[start : start + width]).digest()
        yield key


def cached_tokens(prompt: Prompt, caches: Sequence[Cache]) -> dict[str, int]:
    """Of the prompt, by replica; those that have nothing of it are left out."""
    found: dict[str, int] = {}
    longest = prompt.num_tokens - 1
    numbers: dict[int, list[int]] = {}  # by block size, as far as they were asked for
    keys: dict[int, Iterator[bytes]] = {}
    for replica_id, bits, mask, size in caches:
        if size not in numbers:
            numbers[size], keys[size] = [], keys_of(prompt, size)
        known, more = numbers[size], keys[size]
        depth = 0
        while True:
            if depth == len(known):
                key = next(more, b"")
                if not key:
                    break
                known.append(int.from_bytes(key[:4], "little"))
            number = known[depth]
            if not bits[(number & mask) >> 3] >> (number & 7) & 1:
                break
            depth += 1
        if depth:
            found[replica_id] = min(depth * size, longest)
    return found


class Sent:
    """Prompts that this gateway sent a moment ago, and to which replica."""

    def __init__(self) -> None:
        self._alike: OrderedDict[bytes, deque[tuple[float, bytes, str]]] = OrderedDict()
        self._num = 0

    def note(self, version_id: str, prompt: Prompt, replica_id: str, now: float) -> None:
        head = _head(version_id, prompt)
        alike = self._alike.get(head)
        if alike is None:
            alike = self._alike[head] = deque(maxlen=MAX_ALIKE)
        self._alike.move_to_end(head)
        self._num += len(alike) < MAX_ALIKE
        alike.append((now + SENT_S, prompt.data, replica_id))
        while self._num > MAX_SENT or next(iter(self._alike.values()))[-1][0] <= now:
            self._num -= len(self._alike.popitem(last=False)[1])

    def cached_tokens(self, version_id: str, prompt: Prompt, now: float) -> dict[str, int]:
        """Of what begins as an earlier prompt did, all of that one, by replica."""
        found: dict[str, int] = {}
        for until, data, replica_id in self._alike.get(_head(version_id, prompt), ()):
            if until > now and prompt.data.startswith(data):
                found[replica_id] = max(found.get(replica_id, 0), len(data) // 8)
        longest = prompt.num_tokens - 1
        return {name: min(depth, longest) for name, depth in found.items()}


def _head(version_id: str, prompt: Prompt) -> bytes:
    return b"%b\0%b\0%b" % (version_id.encode(), prompt.salt, prompt.data[: 8 * HEAD_TOKENS])
