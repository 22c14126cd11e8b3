"""A Merkle tree as it is stored: tiles of up to 256 hashes, so that a proof reads a few rows.

Tile (0, i) holds the leaf hashes 256 i to 256 i + 255, tile (1, i) the roots of the full tiles
(0, 256 i) to (0, 256 i + 255), and so on; the inner nodes in between are computed when asked for.
Worked example, 70,000 records::

    tiles (0, 0) … (0, 272) full, (0, 273) with 112 hashes      2.2 MB
    tile  (1, 0) full, (1, 1) with 17; tile (2, 0) with 1

An inclusion proof among them reads at most three tiles a level. A full tile never changes again;
the last one of a level is replaced by a longer one. After Go's tlog, whose tiles these are.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

from controlplane.application.merkle import Frontier, ProofError

HEIGHT = 8
WIDTH = 1 << HEIGHT
HASH_BYTES = 32

Tile = tuple[int, int]  # (level, index)
ReadTile = Callable[[int, int], bytes]  # empty if there is no such tile


class TiledTree:
    """A tree that grows, with its tiles: each leaf is hashed once for both.

    Above full tiles stands a frontier over their roots, beside it one over the last tile's leaves;
    the peaks of both, one after the other, are those of the whole tree.
    """

    def __init__(self) -> None:
        self.size = 0
        self._partial: dict[Tile, bytes] = {}
        self._full, self._last = Frontier(), Frontier()

    def extend(self, leaves: Sequence[bytes]) -> dict[Tile, bytes]:
        """The new content of every tile that changes."""
        size = self.size
        changed = grow(lambda *tile: self._partial.get(tile, b""), size, leaves, self._full.extend)
        self._partial = {
            place: content
            for place, content in {**self._partial, **changed}.items()
            if len(content) < WIDTH * HASH_BYTES
        }
        self.size = size + len(leaves)
        if size // WIDTH != self.size // WIDTH:  # a tile was filled: what follows is a new one's
            self._last = Frontier()
        missing = self.size % WIDTH - self._last.size
        self._last.extend(leaves[len(leaves) - missing :])
        return changed

    def root(self) -> bytes:
        return Frontier(self.size, [*self._full.peaks, *self._last.peaks]).root()

    def partial(self) -> dict[Tile, bytes]:
        """The tiles that are not full, by place."""
        return dict(self._partial)


def grow(
    read: ReadTile,
    size: int,
    leaves: Iterable[bytes],
    on_full: Callable[[list[bytes]], None] = lambda roots: None,
) -> dict[Tile, bytes]:
    """The new content of every tile that changes when ``leaves`` follow the first ``size``.

    ``on_full`` gets the roots of the leaves' tiles that become full.
    """
    changed: dict[Tile, bytes] = {}
    fresh, level = b"".join(leaves), 0
    while fresh:
        index, held = divmod(size, WIDTH)
        tile = read(level, index)[: held * HASH_BYTES] if held else b""
        if len(tile) != held * HASH_BYTES:
            raise ProofError(f"tile ({level}, {index}) holds fewer than {held} hashes")
        roots = []
        for start in range(0, len(tile) + len(fresh), WIDTH * HASH_BYTES):
            content = (tile + fresh)[start : start + WIDTH * HASH_BYTES]
            changed[level, index] = content
            index += 1
            if len(content) == WIDTH * HASH_BYTES:
                roots.append(_fold(content, HEIGHT))
        if level == 0:
            on_full(roots)
        fresh, size, level = b"".join(roots), size >> HEIGHT, level + 1
    return changed


def _fold(hashes: bytes, height: int) -> bytes:
    """The root over 2 ** ``height`` hashes."""
    pair = 2 * HASH_BYTES
    for _ in range(height):  # as ``node_hash``, of two that already lie side by side
        pairs = range(0, len(hashes), pair)
        hashes = b"".join([sha256(b"\x01" + hashes[at : at + pair]).digest() for at in pairs])
    return hashes


def nodes_in(read: ReadTile) -> Callable[[int, int], bytes]:
    """``merkle.Nodes`` over tiles; each tile is read once."""
    kept: dict[Tile, bytes] = {}

    def tile(level: int, index: int) -> bytes:
        if (level, index) not in kept:
            kept[level, index] = read(level, index)
        return kept[level, index]

    def node(level: int, index: int) -> bytes:
        row, height = divmod(level, HEIGHT)
        number, offset = divmod(index << height, WIDTH)
        part = tile(row, number)[offset * HASH_BYTES : (offset + (1 << height)) * HASH_BYTES]
        if len(part) != HASH_BYTES << height:
            raise ProofError(f"tile ({row}, {number}) is missing or too short")
        return _fold(part, height)

    return node
