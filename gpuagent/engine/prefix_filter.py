"""Which prefixes a cache holds, in a few bytes: for a router, which need not know exactly.

A Bloom filter with one hash over the keys of the cached blocks (`kv_cache`). A key chains over all
tokens before it, so who has a prompt asks for its keys in order and stops at the first that is
missing; what it found is how much of the prompt needs no prefill here. Example, 8 bits:

    cached     keys with first bytes 0x12 0x2b 0x6f: bits 2, 3 and 7     filter 0b10001100
    prompt 1   keys 0x12 0x2b 0x40: bit 2 yes, bit 3 yes, bit 0 no       2 blocks cached
    prompt 2   keys 0x0a ...: bit 2 yes, though it is not cached; 0x55: bit 5 no     1 block, wrong

A key that is not cached is found with chance 1 - exp(-1/8) = 12 %, and the next one too with 12 %
of that: a prefix seems longer than it is by 0.13 of a block on average. Rejected: the keys
themselves (8 bytes each to be as good as exact, eight times as much), the last block of each
request alone (says nothing once the chat goes on differently, or when two share a beginning), and
several hashes (fewer wrong ones, each worth no more than a block).

What a router is told is bounded: the last used `MAX_KEYS` blocks, 8 KiB.
"""

from array import array
from collections.abc import Sequence

MAX_KEYS = 8192
BITS_PER_KEY = 8
MIN_BITS = 64


def filter_of(keys: Sequence[bytes]) -> bytes:
    """The filter of at most `MAX_KEYS` keys, of a power of two of bits; empty for none."""
    if not keys:
        return b""
    num_bits = max(MIN_BITS, 1 << (len(keys) * BITS_PER_KEY - 1).bit_length())
    mask, bits = num_bits - 1, bytearray(num_bits // 8)
    for number in array("I", b"".join([key[:4] for key in keys])):
        bit = number & mask
        bits[bit >> 3] |= 1 << (bit & 7)
    return bytes(bits)
