"""What placement is compared with: first fit, best fit, random, fragmentation gradient descent.

One plain simulator for all four. GPUs are thousandths (``gpu_milli``), a workload wants one share
of one GPU or several whole ones, and processors and memory of its node. Fragmentation gradient
descent (Weng et al., ATC 2023, section 4) places where F, the GPU capacity that typical workloads M
could not use, grows least::

    F_n(M) = Σ_m p_m · (all free GPU of n, if m does not fit on n by GPUs or processors, else the
                        free parts of GPUs that are smaller than m's share)

as their simulator computes it (``NodeGpuShareFragAmount``); its rounding of scores to a hundred
steps is left out, which can only help it. Ties go to the first node. Choices for one shape are kept
and computed again only for nodes that changed.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Workload(NamedTuple):
    num_gpus: int
    gpu_milli: int
    cpu_milli: int
    memory_mib: int

    @property
    def total_milli(self) -> int:
        return self.num_gpus * self.gpu_milli


class Machine(NamedTuple):
    num_gpus: int
    model: str
    cpu_milli: int
    memory_mib: int


Array = Any


class Peer(ABC):
    """``free`` GPU thousandths ``[nodes, 8]``, -1 where there is none."""

    name = ""

    def __init__(self, machines: Sequence[Machine], typical: Counter[Workload], seed: int) -> None:
        self.free = np.full((len(machines), 8), -1)
        for row, one in enumerate(machines):
            self.free[row, : one.num_gpus] = 1000
        self.cpu = np.array([one.cpu_milli for one in machines])
        self.memory = np.array([one.memory_mib for one in machines])
        self.chance = random.Random(seed)
        self._kept: dict[Workload, tuple[Array, Array, int]] = {}
        self._changed: list[int] = []
        self.prepare(typical)

    def prepare(self, typical: Counter[Workload]) -> None:  # noqa: B027 (a hook)
        """Before the first placement."""

    def place(self, wanted: Workload) -> bool:
        """Take what it wants on the best node; False if it fits on none."""
        scores, gpus = self._standings(wanted)
        row = self.choose(scores)
        if scores[row] == -np.inf:
            return False
        for gpu in self._gpus(wanted, row, int(gpus[row])):
            self.free[row, gpu] -= wanted.gpu_milli
        self.cpu[row] -= wanted.cpu_milli
        self.memory[row] -= wanted.memory_mib
        self._changed.append(row)
        self.took(row)
        return True

    def choose(self, scores: Array) -> int:
        return int(scores.argmax())

    def took(self, row: int) -> None:  # noqa: B027 (a hook)
        """After each placement."""

    def _gpus(self, wanted: Workload, row: int, gpu: int) -> list[int]:
        if wanted.num_gpus == 1:
            return [gpu]
        return [int(g) for g in np.flatnonzero(self.free[row] >= wanted.gpu_milli)][
            : wanted.num_gpus
        ]

    def _standings(self, wanted: Workload) -> tuple[Array, Array]:
        kept = self._kept.get(wanted)
        if kept is None:
            scores, gpus = self._evaluate(wanted, np.arange(len(self.free)))
        else:
            scores, gpus, seen = kept
            rows = np.unique(np.array(self._changed[seen:], int))
            if len(rows):
                scores[rows], gpus[rows] = self._evaluate(wanted, rows)
        self._kept[wanted] = scores, gpus, len(self._changed)
        return scores, gpus

    def _evaluate(self, wanted: Workload, rows: Array) -> tuple[Array, Array]:
        """The score of each of ``rows`` and the GPU for a share; -inf where it does not fit."""
        free = self.free[rows]
        fed = (self.cpu[rows] >= wanted.cpu_milli) & (self.memory[rows] >= wanted.memory_mib)
        fits = (free >= max(1, wanted.gpu_milli)) & fed[:, None]
        scores, gpus = np.full(len(rows), -np.inf), np.zeros(len(rows), int)
        if wanted.num_gpus == 1:
            where, gpu = np.nonzero(fits)
            table = np.full(free.shape, -np.inf)
            after = free[where]
            after[np.arange(len(where)), gpu] -= wanted.gpu_milli
            table[where, gpu] = self.score(rows[where], free[where], after, wanted, gpu)
            gpus = table.argmax(1)
            return table[np.arange(len(rows)), gpus], gpus
        enough = np.flatnonzero((fits.sum(1) >= wanted.num_gpus) if wanted.num_gpus else fed)
        after = free[enough]
        for index, row in enumerate(enough):
            after[index, np.flatnonzero(fits[row])[: wanted.num_gpus]] -= wanted.gpu_milli
        scores[enough] = self.score(rows[enough], free[enough], after, wanted, None)
        return scores, gpus

    @abstractmethod
    def score(
        self, rows: Array, free: Array, after: Array, wanted: Workload, gpu: Array | None
    ) -> Array:
        """The higher, the better; ``gpu``: which one gives the share."""


class FirstFit(Peer):
    name = "first_fit"

    def score(
        self, rows: Array, free: Array, after: Array, wanted: Workload, gpu: Array | None
    ) -> Array:
        return -rows.astype(float)


class BestFit(Peer):
    """The GPU that is left with the least, then the node that is."""

    name = "best_fit"

    def score(
        self, rows: Array, free: Array, after: Array, wanted: Workload, gpu: Array | None
    ) -> Array:
        node = np.maximum(after, 0).sum(1)
        return (
            -node.astype(float) if gpu is None else -(free[np.arange(len(gpu)), gpu] * 1e4 + node)
        )


class Random(Peer):
    name = "random"

    def choose(self, scores: Array) -> int:
        feasible = np.flatnonzero(scores > -np.inf)
        return int(self.chance.choice(feasible)) if len(feasible) else 0

    def score(
        self, rows: Array, free: Array, after: Array, wanted: Workload, gpu: Array | None
    ) -> Array:
        return np.zeros(len(rows))


class FragmentationGradientDescent(Peer):
    name = "fgd"

    def prepare(self, typical: Counter[Workload]) -> None:
        shapes = [one for one in typical if one.num_gpus]
        self._num = np.array([one.num_gpus for one in shapes])
        self._share = np.array([one.gpu_milli for one in shapes])
        self._cpu = np.array([one.cpu_milli for one in shapes])
        weights = np.array([typical[one] for one in shapes], float)
        self._popularity = weights / weights.sum()
        self._now = self.fragments(self.free, self.cpu)

    def took(self, row: int) -> None:
        self._now[row] = self.fragments(self.free[row : row + 1], self.cpu[row : row + 1])[0]

    def score(
        self, rows: Array, free: Array, after: Array, wanted: Workload, gpu: Array | None
    ) -> Array:
        return self._now[rows] - self.fragments(after, self.cpu[rows] - wanted.cpu_milli)

    def fragments(self, free: Array, cpu: Array) -> Array:
        """F of nodes with ``free`` ``[R, 8]`` and ``cpu`` ``[R]``."""
        free = np.maximum(free, 0)
        fits = free[:, None, :] >= self._share[None, :, None]
        runs = (fits.sum(2) >= self._num) & (cpu[:, None] >= self._cpu)
        small = (free[:, None, :] * ~fits).sum(2)
        lost = np.where(runs, small, free.sum(1)[:, None])
        return (lost * self._popularity).sum(1)


PEERS: tuple[Callable[[Sequence[Machine], Counter[Workload], int], Peer], ...] = (
    FirstFit,
    BestFit,
    Random,
    FragmentationGradientDescent,
)
