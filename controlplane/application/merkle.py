"""RFC 6962 Merkle trees: one 32-byte root stands for every record of a log, in its order.

A leaf is SHA-256(0x00 || record), an inner node SHA-256(0x01 || left || right), and a tree of n
leaves has the largest power of two below n on its left. Worked example, five records a to e::

              root                     inclusion of c in 5:   d, ab, e
            /      \\                   consistency 3 -> 5:    c, d, ab, e
        abcd        e
       /    \\                          From c and its proof anyone computes cd, abcd, root, and
      ab     cd                        compares the root with a signed one: three hashes, however
     /  \\   /  \\                       long the records are. The consistency proof shows that the
     a   b  c   d                      first three records were never changed.

The prefixes keep a record from passing for an inner node. Proofs are those of RFC 6962 section 2.1,
checked as in RFC 9162 sections 2.1.3.2 and 2.1.4.2.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

EMPTY_ROOT = sha256().digest()

# (level, index) -> hash of the complete subtree over leaves [index << level, (index + 1) << level)
Nodes = Callable[[int, int], bytes]


class ProofError(Exception):
    """What was asked for lies outside the tree."""


def leaf_hash(record: bytes) -> bytes:
    return sha256(b"\x00" + record).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return sha256(b"\x01" + left + right).digest()


class Frontier:
    """The roots of the complete subtrees of a growing tree, widest first: all that appending needs.

    Five leaves are ``[abcd, e]``; a sixth makes ``[abcd, ef]``, and a hundred million records need
    no more than 27 hashes.
    """

    __slots__ = ("peaks", "size")

    def __init__(self, size: int = 0, peaks: Iterable[bytes] = ()) -> None:
        self.size, self.peaks = size, list(peaks)
        if len(self.peaks) != size.bit_count() or any(len(peak) != 32 for peak in self.peaks):
            raise ValueError(f"a tree of {size} leaves has {size.bit_count()} peaks of 32 bytes")

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Append them; each new leaf merges with the complete subtrees of its own width."""
        peaks, size = self.peaks, self.size
        for leaf in leaves:
            width = size
            while width & 1:
                leaf = sha256(b"\x01" + peaks.pop() + leaf).digest()
                width >>= 1
            peaks.append(leaf)
            size += 1
        self.size = size

    def root(self) -> bytes:
        """Of the tree so far; SHA-256 of nothing if it is empty."""
        if not self.peaks:
            return EMPTY_ROOT
        *wider, root = self.peaks
        for peak in reversed(wider):
            root = node_hash(peak, root)
        return root

    def copy(self) -> "Frontier":
        return Frontier(self.size, self.peaks)


def root_of(leaves: Iterable[bytes]) -> bytes:
    """The root over ``leaves``, which are leaf hashes."""
    tree = Frontier()
    tree.extend(leaves)
    return tree.root()


def _split(size: int) -> int:
    """The largest power of two below ``size``, which is at least 2."""
    return 1 << ((size - 1).bit_length() - 1)


def subtree(nodes: Nodes, low: int, high: int) -> bytes:
    """MTH(D[low:high]) of section 2.1; ``low`` is a multiple of every split in between."""
    size = high - low
    if size & (size - 1) == 0 and low % size == 0:
        level = size.bit_length() - 1
        return nodes(level, low >> level)
    middle = low + _split(size)
    return node_hash(subtree(nodes, low, middle), subtree(nodes, middle, high))


def inclusion_proof(nodes: Nodes, index: int, size: int) -> list[bytes]:
    """PATH(index, D[size]): what turns leaf ``index`` (from 0) into the root of ``size`` leaves."""
    if not 0 <= index < size:
        raise ProofError(f"a tree of {size} has no leaf {index}")
    low, high, proof = 0, size, []
    while high - low > 1:
        middle = low + _split(high - low)
        if index < middle:
            proof.append(subtree(nodes, middle, high))
            high = middle
        else:
            proof.append(subtree(nodes, low, middle))
            low = middle
    return proof[::-1]


def consistency_proof(nodes: Nodes, old: int, new: int) -> list[bytes]:
    """PROOF(old, D[new]): shows that the tree of ``new`` leaves starts with that of ``old``."""
    if not 0 < old <= new:
        raise ProofError(f"no tree of {new} grew out of one of {old}")
    low, high, proof, whole = 0, new, [], True
    while high != old:
        middle = low + _split(high - low)
        if old <= middle:
            proof.append(subtree(nodes, middle, high))
            high = middle
        else:
            proof.append(subtree(nodes, low, middle))
            low, whole = middle, False
    if not whole:
        proof.append(subtree(nodes, low, high))
    return proof[::-1]


def proves_inclusion(
    leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes
) -> bool:
    """RFC 9162 section 2.1.3.2."""
    if not 0 <= index < size:
        return False
    node, last, computed = index, size - 1, leaf
    for sibling in proof:
        if last == 0:
            return False
        if node & 1 or node == last:
            computed = node_hash(sibling, computed)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            computed = node_hash(computed, sibling)
        node, last = node >> 1, last >> 1
    return last == 0 and computed == root


def proves_consistency(
    old: int, new: int, proof: Sequence[bytes], old_root: bytes, new_root: bytes
) -> bool:
    """RFC 9162 section 2.1.4.2."""
    if old == new:
        return not proof and old_root == new_root
    if not 0 < old < new or not proof:
        return False
    path = [old_root, *proof] if old & (old - 1) == 0 else list(proof)
    node, last = old - 1, new - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    first = second = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if node & 1 or node == last:
            first, second = node_hash(sibling, first), node_hash(sibling, second)
            while not node & 1 and node:
                node, last = node >> 1, last >> 1
        else:
            second = node_hash(second, sibling)
        node, last = node >> 1, last >> 1
    return last == 0 and first == old_root and second == new_root
