"""How good a feasible device is; higher is better, and every term is stored.

score = - 100 x replicas of this version on the node         (spread over nodes before all else)
        -  20 x replicas of this version in the zone          (then over zones)
        +  10 x labels it wants beside it that are there       (affinity)
        -   1 x stranded bytes / capacity                      (keep what is free useful)
        +   1 x balance                                        (complementary profiles)
        + .05 x fit,  fit = 1 - free afterwards / capacity     (best fit: fill the fuller device)
        - .01 x free on its link afterwards / capacity         (and the fuller node)

*Stranded* is free memory that typical models can use no more (``fragmentation``). *Balance* is how
much nearer a device's busy time and memory come to each other, plus a tenth of how near the
node's free cores and free device memory are: work that is heavy on one goes where the other is
taken, so that neither runs out alone (the alignment of Grandl et al., *Multi-resource Packing for
Cluster Schedulers*, SIGCOMM 2014)::

    balance = |m - c| before - |m - c| after - max(0, c after - 1) + max(0, c before - 1)
              - |free cores - free device memory| / 10
    m, c    parts of the device's memory and time in use, by what the residents typically need

Worked example, devices of 80 GB, a version of 30 GB that runs on n1 in zone z1 already, and nothing
else is typical::

    n1/1  z1  40 GB free    10 GB stranded: -.125 + .05 · .875 - .01 · .125 - 120 = -120.08
    n2/0  z1  80 GB free    50 GB are worth as much as before: 0 + .05 · .375 - .01 · .625 - 20
    n3/0  z2  80 GB free    0 + .0188 - .0063 = .0125
    n3/1  z2  35 GB free    5 GB stranded, -.0625 + ... : filled up, but not to the brim
    n3/2  z2  30 GB free    0 + .05                                                    chosen
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from controlplane.domain.placement import Candidate, ScoreTerm
from controlplane.placement.board import Board, Standing
from controlplane.placement.feasible import Fleet
from controlplane.placement.fragmentation import Array
from controlplane.placement.snapshot import Shape, VersionView

NODE_WEIGHT = 100.0
ZONE_WEIGHT = 20.0
AFFINITY_WEIGHT = 10.0
STRANDED_WEIGHT = 1.0
BALANCE_WEIGHT = 1.0
FIT_WEIGHT = 0.05
LINK_WEIGHT = 0.01
HOST_BALANCE = 0.1


class Terms(NamedTuple):
    """Of every cell, ``[rows, width]`` each; those that are stored, in their order. ``stranded``
    and ``link_free`` in devices of that size."""

    fit: Array
    free_after_bytes: Array
    replicas_on_node: Array
    replicas_in_zone: Array
    affinity: Array
    stranded: Array
    balance: Array
    link_free: Array


def terms(fleet: Fleet, version: VersionView, standing: Standing) -> Terms:
    """What the score is made of, for every device, feasible or not; of a group, its leader's."""
    board, shape = fleet.board, version.shape
    capacity = board.devices
    free_after = board.free - shape.shard_bytes
    link_after = (board.row_free - shape.num_devices * shape.shard_bytes)[:, None]
    return Terms(
        1.0 - free_after / capacity,
        free_after,
        _by_row(board, fleet.num_on_node.get(version.version_id), fleet.rows_of_node),
        _by_row(board, fleet.num_in_zone.get(version.version_id), fleet.rows_of_zone),
        _affinity(fleet, version),
        standing.stranded / capacity,
        _balance(board, shape, free_after, link_after),
        link_after / capacity,
    )


def score(found: Terms) -> Array:
    """The weighted sum for every cell, added up in this order, so bit for bit. A term that is 0
    everywhere is passed over, which changes nothing."""
    total = FIT_WEIGHT * found.fit - LINK_WEIGHT * found.link_free
    total -= STRANDED_WEIGHT * found.stranded
    for weight, term in (
        (BALANCE_WEIGHT, found.balance),
        (AFFINITY_WEIGHT, found.affinity),
        (-ZONE_WEIGHT, found.replicas_in_zone),
        (-NODE_WEIGHT, found.replicas_on_node),
    ):
        if term is not _NOTHING:
            total += weight * term
    return total


def candidates(
    fleet: Fleet, found: Terms, scores: Array, cells: Sequence[int]
) -> tuple[Candidate, ...]:
    """Term by term, for those that are stored."""
    width = scores.shape[1]
    columns = [
        _stored(name, term, width, cells) for name, term in zip(Terms._fields, found, strict=True)
    ]
    rated = zip(map(fleet.slots.__getitem__, cells), cells, zip(*columns, strict=True), strict=True)
    return tuple(
        [
            Candidate(slot.node.node_id, slot.device.index, scores.item(cell), named)
            for slot, cell, named in rated
        ]
    )


def _stored(name: str, term: Array, width: int, cells: Sequence[int]) -> list[ScoreTerm]:
    """One term of each of the cells; it may be of a whole row, or of the whole fleet."""
    if term is _NOTHING:
        return [_NONE[name]] * len(cells)
    if term.shape[1] == 1:
        cells = [cell // width for cell in cells]
    return [ScoreTerm(name, float(term.item(cell))) for cell in cells]


def _by_row(
    board: Board, numbers: Mapping[str, int] | None, rows_of: Mapping[str, list[int]]
) -> Array:
    """``[rows, 1]``: the number of each row's node, or zone."""
    if not numbers:
        return _NOTHING
    found = np.zeros((len(board.rows), 1))
    for name, number in numbers.items():
        found[rows_of[name]] = number
    return found


def _affinity(fleet: Fleet, version: VersionView) -> Array:
    """How many of the labels that it wants beside it are on each device."""
    wanted = version.spec.colocation.affinity
    if not wanted:
        return _NOTHING
    met = np.zeros(fleet.board.free.size)
    for label in set(wanted):
        cells = fleet.labelled.get(label, {})
        met[[cell for cell, number in cells.items() if number > 0]] += 1
    return met.reshape(fleet.board.free.shape)


_NOTHING = np.zeros((1, 1))
_NONE = {name: ScoreTerm(name, 0.0) for name in Terms._fields}


def _balance(board: Board, shape: Shape, free_after: Array, link_after: Array) -> Array:
    """See the module; 0 where nobody says what it needs but memory."""
    balance = _NOTHING
    if board.any_compute or shape.compute:
        capacity = board.devices
        busy, busy_after = board.compute / 100, (board.compute + shape.compute) / 100
        balance = (
            np.abs((board.capacity - board.free) / capacity - busy)
            - np.abs((board.capacity - free_after) / capacity - busy_after)
            - np.maximum(0, busy_after - 1)
            + np.maximum(0, busy - 1)
        )
    if board.any_host:
        cores = (board.cpu[board.node] - shape.cpu_milli)[:, None] / board.cpu_total[
            board.node, None
        ]
        memory = link_after / np.maximum(1, board.room.sum(1))[:, None]
        balance = balance - HOST_BALANCE * np.abs(cores - memory)
    return balance
