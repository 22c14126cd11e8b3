"""The tree is RFC 6962's: its known vectors, its proofs, and its storage in tiles."""

import random
from hashlib import sha256

import pytest

from controlplane.application import merkle, tiles
from controlplane.application.merkle import Frontier, ProofError, leaf_hash, root_of

# The inputs and roots of Certificate Transparency's own tests (RFC 6962 reference code).
INPUTS = [
    bytes.fromhex(text)
    for text in (
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]  # fmt: skip
ROOTS = (
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)


def leaves(count: int) -> list[bytes]:
    return [leaf_hash(str(index).encode()) for index in range(count)]


def naive(hashes: list[bytes]) -> bytes:
    """MTH by its definition in RFC 6962 section 2.1."""
    if len(hashes) < 2:
        return hashes[0] if hashes else sha256().digest()
    split = 1
    while split * 2 < len(hashes):
        split *= 2
    return merkle.node_hash(naive(hashes[:split]), naive(hashes[split:]))


def stored(hashes: list[bytes], sizes: list[int]) -> dict[tiles.Tile, bytes]:
    """The tiles of a tree that grew in steps to ``sizes``."""
    kept: dict[tiles.Tile, bytes] = {}
    done = 0

    def read(level: int, index: int) -> bytes:
        return kept.get((level, index), b"")

    for size in sizes:
        kept.update(tiles.grow(read, done, hashes[done:size]))
        done = size
    return kept


@pytest.mark.parametrize("size", range(1, 9))
def test_against_the_reference_vectors(size: int) -> None:
    assert root_of(map(leaf_hash, INPUTS[:size])).hex() == ROOTS[size - 1]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 65, 1000])
def test_against_the_definition(size: int) -> None:
    assert root_of(leaves(size)) == naive(leaves(size))


def test_a_tree_grown_in_any_steps_is_stored_the_same() -> None:
    """Whatever the sealing's rhythm was, the tiles at one size are the same bytes."""
    hashes, chance = leaves(70_000), random.Random(1)
    at_once = stored(hashes, [70_000])
    steps = [*sorted(chance.sample(range(1, 70_000), 60)), 70_000]
    assert stored(hashes, steps) == at_once
    assert len(at_once[0, 273]) == 112 * 32 and len(at_once[1, 1]) == 17 * 32
    assert len(at_once[2, 0]) == 32


def test_a_tiled_tree_has_the_same_root_and_tiles() -> None:
    """After every step of any size, also those that end with a tile or pass several."""
    hashes, chance = leaves(3_000), random.Random(3)
    tree, kept = tiles.TiledTree(), {}
    while tree.size < 3_000:
        step = chance.choice((1, 7, 255, 256, 300, 256 - tree.size % 256))
        kept |= tree.extend(hashes[tree.size : tree.size + step])
        assert tree.root() == root_of(hashes[: tree.size])
    assert kept == stored(hashes, [3_000])
    assert tree.partial() == {at: one for at, one in kept.items() if len(one) < 256 * 32}


def test_every_proof_of_small_trees_holds_and_no_other_does() -> None:
    hashes = leaves(40)
    kept = stored(hashes, [40])
    nodes = tiles.nodes_in(lambda *tile: kept.get(tile, b""))
    roots = {size: root_of(hashes[:size]) for size in range(1, 41)}
    for size in range(1, 41):
        for index in range(size):
            proof = merkle.inclusion_proof(nodes, index, size)
            given = (index, size, proof, roots[size])
            assert merkle.proves_inclusion(hashes[index], *given)
            assert not merkle.proves_inclusion(leaf_hash(b"other"), *given)
            assert not merkle.proves_inclusion(
                hashes[index], index, size, [*proof, b"\0" * 32], roots[size]
            )
        for old in range(1, size + 1):
            proof = merkle.consistency_proof(nodes, old, size)
            assert merkle.proves_consistency(old, size, proof, roots[old], roots[size])
            assert not merkle.proves_consistency(old, size, proof, b"\1" * 32, roots[size])
            if old < size:
                assert not merkle.proves_consistency(old, size, proof[1:], roots[old], roots[size])


def test_a_proof_of_a_large_tree_reads_a_few_tiles() -> None:
    """Among 70,000 records at most three tiles a level are read."""
    hashes = leaves(70_000)
    kept, asked = stored(hashes, [70_000]), []

    def read(level: int, index: int) -> bytes:
        asked.append((level, index))
        return kept.get((level, index), b"")

    root = root_of(hashes)
    for index in (0, 255, 256, 65_535, 65_536, 69_999):
        asked.clear()
        proof = merkle.inclusion_proof(tiles.nodes_in(read), index, 70_000)
        assert merkle.proves_inclusion(hashes[index], index, 70_000, proof, root)
        assert len(asked) <= 9
    proof = merkle.consistency_proof(tiles.nodes_in(read), 66_001, 70_000)
    assert merkle.proves_consistency(66_001, 70_000, proof, root_of(hashes[:66_001]), root)


def test_a_frontier_goes_on_where_it_was_left() -> None:
    tree = Frontier()
    tree.extend(leaves(1000)[:777])
    resumed = Frontier(777, tree.peaks)
    resumed.extend(leaves(1000)[777:])
    assert resumed.root() == root_of(leaves(1000))
    with pytest.raises(ValueError):
        Frontier(777, tree.peaks[1:])


def test_what_is_not_in_the_tree_has_no_proof() -> None:
    nodes = tiles.nodes_in(lambda level, index: b"")
    for index, size in ((5, 5), (-1, 5), (0, 0)):
        with pytest.raises(ProofError):
            merkle.inclusion_proof(nodes, index, size)
    for old, new in ((0, 5), (6, 5)):
        with pytest.raises(ProofError):
            merkle.consistency_proof(nodes, old, new)
    with pytest.raises(ProofError):
        merkle.inclusion_proof(nodes, 0, 5)
