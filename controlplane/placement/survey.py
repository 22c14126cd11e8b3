"""All devices compared for one replica: who can take it, how good each is, why the others lost.

What was found is kept as arrays over the devices; stored rows are made of the best candidates and,
for each code, of the first rejections (all of a small fleet). The whole table is ``whole=True``.
Worked example, three devices, a version of 8 GB::

    cell        0                    1       2
    code        insufficient_memory  -       closed
    score       -                    .0125   -          best 1, num_candidates 1
    ruled_out   (("insufficient_memory", 1), ("node_draining", 1))
"""

from collections import Counter
from dataclasses import dataclass
from typing import cast

import numpy as np

from controlplane.domain.placement import Candidate, Rejection
from controlplane.placement.board import CODES, Standing, evaluate
from controlplane.placement.feasible import Fleet, Slot, rejection, too_full
from controlplane.placement.fragmentation import Array
from controlplane.placement.score import Terms, candidates, score, terms
from controlplane.placement.snapshot import VersionView

SMALL_FLEET = 16  # devices
MAX_CANDIDATES = 16  # stored with a start on a small fleet, so that an event stays small,
FEW_CANDIDATES = 4  # and on a larger one,
FEW_REJECTIONS = 2  # where this many of each code are kept
LASTING = "closed", "wrong_class", "no_engine", "too_few_devices", "too_small"
_CODE = {code: index for index, code in enumerate(CODES)}
_FREE, _CLOSED = _CODE[""], _CODE["closed"]
_BACKOFF, _HERE, _APART = (len(CODES) + index for index in range(3))
_DYNAMIC = {_BACKOFF: "backoff", _HERE: "already_here", _APART: "anti_affinity"}


@dataclass(slots=True)
class Survey:
    """``code`` and ``scores`` are flat, by cell; what cannot take the replica scores nothing.
    ``counts``: how many cells have each code."""

    fleet: Fleet
    version: VersionView
    standing: Standing
    code: Array
    terms: Terms
    scores: Array
    counts: list[int]

    @property
    def num_candidates(self) -> int:
        return self.counts[_FREE]

    @property
    def best(self) -> int:
        """The cell of the highest score, the first of equals; meaningless without a candidate."""
        return int(self.scores.argmax())

    def group(self, cell: int) -> list[int]:
        """The cells that a replica led by ``cell`` takes, that one first."""
        if self.standing.group is None:
            return [cell]
        row, width = cell // self.fleet.board.width, self.fleet.board.width
        return [row * width + int(column) for column in self.standing.group[row]]

    @property
    def _is_small(self) -> bool:
        return len(self.fleet.slots) <= SMALL_FLEET

    def candidates(self, whole: bool = False) -> tuple[Candidate, ...]:
        """Best first; equals in the order of their cells."""
        most = (
            self.num_candidates if whole else MAX_CANDIDATES if self._is_small else FEW_CANDIDATES
        )
        cells = _highest(self.scores, min(self.num_candidates, most))
        shaped = self.scores.reshape(self.fleet.board.free.shape)
        return candidates(self.fleet, self.terms, shaped, cells)

    def rejections(self, whole: bool = False) -> tuple[Rejection, ...]:
        """In the order of cells; of a large fleet a few of each code, unless it is to be whole."""
        is_cut = not whole and not self._is_small
        kept = (
            _few_of_each(self.code, self.counts) if is_cut else np.flatnonzero(self.code).tolist()
        )
        slots = self.fleet.slots
        return tuple(self._rejection(slots[cell]) for cell in kept if cell in slots)

    def ruled_out(self) -> tuple[tuple[str, int], ...]:
        """How many devices each rule excluded, by code."""
        counts: dict[str, int] = {}
        for code, number in enumerate(self.counts):
            if code == _CLOSED and number:
                counts.update(self._closed())
            elif code and number:
                counts[_name(code)] = number
        return tuple(sorted(counts.items()))

    def _closed(self) -> Counter[str]:
        cells = np.flatnonzero(self.code == _CLOSED).tolist()
        slots = (self.fleet.slots.get(cell) for cell in cells)
        return Counter(slot.closed[0] for slot in slots if slot and slot.closed)

    def _rejection(self, slot: Slot) -> Rejection:
        name = _name(int(self.code[slot.cell]))
        where = slot.node.node_id, slot.device.index
        if name == "insufficient_memory":  # most are
            return Rejection(*where, name, too_full(self.version, slot.free_bytes))
        if name == "too_few_free":
            return Rejection(
                *where, name, f"needs {self.version.shape.num_devices} like it on its link"
            )
        if name == "in_group":
            leader = self.fleet.slots[self._leader(slot)]
            return Rejection(*where, name, f"compared as a group with device {leader.device.index}")
        return cast(Rejection, rejection(self.fleet, slot, self.version))

    def _leader(self, slot: Slot) -> int:
        width = self.fleet.board.width
        row = slot.cell // width
        return row * width + int(cast(Array, self.standing.group)[row, 0])


def survey(fleet: Fleet, version: VersionView) -> Survey:
    """Compare every device for one more replica of ``version``."""
    board = fleet.board
    standing = board.ranking.of(version.shape)
    barred = _barred(fleet, version)
    if barred and standing.group is not None:
        standing = _without(fleet, version, standing, barred)
    code = standing.code.reshape(-1)
    if barred:
        code = _overlaid(code, barred)
    found = terms(fleet, version, standing)
    scores = score(found).reshape(-1)
    np.putmask(scores, code != _FREE, -np.inf)
    counts = np.bincount(code, minlength=1).tolist()
    return Survey(fleet, version, standing, code, found, scores, counts)


def _barred(fleet: Fleet, version: VersionView) -> dict[int, int]:
    """Cells excluded for this very version, with the code; the weightiest is written last."""
    barred = dict.fromkeys(fleet.unwanted_beside(version), _APART)
    holding = fleet.holding.get(version.version_id)
    if holding:
        barred.update((cell, _HERE) for cell, number in holding.items() if number > 0)
    width = fleet.board.width
    for failure in fleet.failures.get(version.version_id, ()):
        for row in fleet.rows_of_node.get(failure.node_id, ()):
            num = len(fleet.board.rows[row][1])
            barred.update((row * width + column, _BACKOFF) for column in range(num))
    return barred


def _overlaid(code: Array, barred: dict[int, int]) -> Array:
    """The codes with those of ``barred``: a failure comes before all but a closed node, company
    before what is full (see ``feasible``)."""
    code = code.copy()
    lasting = tuple(_CODE[one] for one in LASTING)
    for cell, reason in barred.items():
        weightier = lasting[:1] if reason == _BACKOFF else lasting
        if code[cell] not in weightier:
            code[cell] = reason
    return code


def _without(
    fleet: Fleet, version: VersionView, standing: Standing, barred: dict[int, int]
) -> Standing:
    """The standing with the groups of the touched rows formed anew, from other devices."""
    board = fleet.board
    mask = np.zeros(board.free.size, bool)
    mask[list(barred)] = True
    rows = np.unique(np.array(list(barred), np.int64) // board.width)
    new = evaluate(board, version.shape, rows, mask.reshape(board.free.shape)[rows])
    code, stranded = standing.code.copy(), standing.stranded.copy()
    group = cast(Array, standing.group).copy()
    code[rows], stranded[rows], group[rows] = new.code, new.stranded, new.group
    return Standing(code, stranded, group, standing.seen)


def _few_of_each(code: Array, counts: list[int]) -> list[int]:
    """The first ``FEW_REJECTIONS`` cells with each code, in the order of cells."""
    few: list[int] = []
    for one, number in enumerate(counts):
        if one != _FREE and number:
            few += (code == one).nonzero()[0][:FEW_REJECTIONS].tolist()
    return sorted(few)


def _highest(scores: Array, number: int) -> list[int]:
    """The cells of the ``number`` highest scores, best first, equals in order."""
    if number > MAX_CANDIDATES:
        return cast(list[int], np.argsort(-scores, kind="stable")[:number].tolist())
    left = scores.copy()
    cells: list[int] = []
    for _ in range(number):
        cells.append(int(left.argmax()))
        left[cells[-1]] = -np.inf
    return cells


def _name(code: int) -> str:
    return CODES[code] if code < len(CODES) else _DYNAMIC[code]
