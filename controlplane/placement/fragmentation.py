"""How much memory a placement strands: free memory that typical models could use no more.

Free memory is worth what can still be put there. Over the typical demand M, where shape m (on num_m
devices side by side, size_m bytes on each) is wanted with weight p_m, devices of one row (one link
of one node) with free memory f_d have the expected usable memory::

    U = Σ_m p_m · [ at least num_m devices have f_d >= size_m, and the host has cpu_m and mem_m ]
            · Σ_d f_d · [f_d >= size_m]

and putting a shape of ``num`` devices and ``size`` bytes there strands, in bytes::

    stranded = (U before - U after) / Σ p - num · size

It is 0 where the rest stays as useful as it was, and less than 0 where mostly useless memory is
used up. This is the fragmentation gradient of Weng et al., *Beware of Fragmentation: Scheduling
GPU-Sharing Workloads with Fragmentation Gradient Descent* (USENIX ATC 2023), section 4, turned
round: what they count as fragments is Σ p · (free memory) - U.

Worked example, devices with 4 and 24 GB free, half the models take 3 GB and half 6 GB; 3 GB go ::

    to the first    U: 4/2 + 0 -> 0     stranded 2 - 0 - 3   = -1    so the first is better,
    to the second   U: 24 -> 21         stranded 24 - 21 - 3 =  0    though nobody can use its 1 GB

A catalog of today says little of the models of tomorrow. Where some need several devices or a part
of the host, whole nodes count as typical too, with a twentieth of all weight: else small models
take a few cores of every node, and the first that needs all of one fits nowhere although half the
fleet is free. (Alibaba's trace, one half as the catalog and the other placed: the first failure at
0.94 of all GPUs instead of 0.59; and at 0.953 instead of 0.955 where nothing is new.)

Weights and bytes are integers, so sums are exact in any order, on any machine.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from controlplane.placement.snapshot import DeviceView, Shape, VersionView, is_of_class

MAX_SHAPES = 96  # of those that need several devices or a part of the host
PART = 32  # rows at a time, so that their arrays stay in the processor's cache
WHOLE_SHARE = 20  # one part in so many of the weight is for whole nodes
MAX_WHOLES = 16  # kinds of nodes
MAX_WEIGHT = 2**14  # of all together: bytes times weights stay below 2^63
Array = Any  # numpy arrays; their shapes are in the docstrings: R rows, W devices each, K shapes


class Host(NamedTuple):
    """What the nodes of some rows have free, each ``[R]``."""

    cpu_milli: Array
    memory: Array


class Typical:
    """The demand that the fleet should stay useful for: the catalog, weighted by replicas wanted,
    and ``wholes``: shapes that take all of a node, by how many such nodes there are.

    ``kinds`` are the fleet's different devices; arrays of kinds index them. Shapes of one device
    without host needs are *simple*: for them U is a sum over devices, looked up by free memory.
    """

    def __init__(
        self,
        versions: Iterable[VersionView],
        kinds: Sequence[DeviceView],
        wholes: Counter[Shape] | None = None,
    ) -> None:
        wanted: Counter[Shape] = Counter()
        for version in versions:
            shape = version.shape
            if shape.guaranteed or shape.compute or shape.engine != "builtin":
                shape = shape._replace(guaranteed=0, compute=0, engine="builtin")
            wanted[shape] += max(1, version.num_replicas)
        simple = {one: n for one, n in wanted.items() if _is_simple(one)}
        others = _merged({one: n for one, n in wanted.items() if not _is_simple(one)})
        scale = max(1, -(-sum(wanted.values()) // MAX_WEIGHT))
        weights = {one: -(-n // scale) for one, n in (*simple.items(), *others.items())}
        if others and wholes:
            weights = _with_wholes(weights, wholes)
            others = {one: n for one, n in weights.items() if not _is_simple(one)}
            simple = {one: n for one, n in weights.items() if _is_simple(one)}
        self.total = max(1, sum(weights.values()))
        self._set_simple(sorted(simple, key=lambda one: one.shard_bytes), weights, kinds)
        self._set_others(sorted(others), weights, kinds)

    def _set_simple(
        self, shapes: list[Shape], weights: dict[Shape, int], kinds: Sequence[DeviceView]
    ) -> None:
        self.sizes = np.array([one.shard_bytes for one in shapes], np.int64)
        worth = np.zeros((len(kinds), len(shapes) + 1), np.int64)
        for index, kind in enumerate(kinds):
            fitting = [weights[one] * is_of_class(kind, one.gpu_classes) for one in shapes]
            worth[index, 1:] = np.cumsum(np.array(fitting, np.int64))
        self.worth = worth  # weight of the shapes that the first n sizes can hold, by kind

    def _set_others(
        self, shapes: list[Shape], weights: dict[Shape, int], kinds: Sequence[DeviceView]
    ) -> None:
        self.num_others = len(shapes)
        self.num = np.array([one.num_devices for one in shapes], np.int64)
        self.size = np.array([one.shard_bytes for one in shapes], np.int64)
        self.cpu = np.array([one.cpu_milli for one in shapes], np.int64)
        self.memory = np.array([one.host_memory for one in shapes], np.int64)
        self.weight = np.array([weights[one] for one in shapes], np.int64)
        self.allowed = np.array(
            [[is_of_class(kind, one.gpu_classes) for one in shapes] for kind in kinds], bool
        ).reshape(len(kinds), len(shapes))

    def alone(self, free: Array, kind: Array) -> Array:
        """What each device is worth to the simple shapes, ``[R, W]``."""
        index = self.sizes.searchsorted(free, "right")
        if len(self.worth) == 1:
            return free * self.worth[0].take(index)
        return free * self.worth[kind, index]

    def lost_by_one(
        self, free: Array, kind: Array, hosts: Sequence[Host], size: int, alone: Array
    ) -> Array:
        """U before - U after ``size`` bytes of one device are taken, by device: ``[R, W]``.

        ``hosts``: before and after, not looked at if all shapes are simple; ``alone`` is that of
        ``free``. Devices with less than ``size`` have no meaning.
        """
        lost = alone - self.alone(free - size, kind)
        if not self.num_others:
            return lost
        parts = [slice(first, first + PART) for first in range(0, len(free), PART)]
        return lost + np.concatenate(
            [
                self._others_lost(
                    free[part],
                    kind[part],
                    [Host(*(one[part] for one in host)) for host in hosts],
                    size,
                )
                for part in parts
            ]
            or [np.zeros_like(lost)]
        )

    def _others_lost(self, free: Array, kind: Array, hosts: Sequence[Host], size: int) -> Array:
        """The same of the shapes that are not simple."""
        left = free - size
        fits, fit_left = self._fits(free, kind), self._fits(left, kind)
        held, num_fit = fits * free[:, :, None], fits.sum(1)
        usable = held.sum(1)
        usable_after = usable[:, None, :] - held + fit_left * left[:, :, None]
        num_after = num_fit[:, None, :] - fits + fit_left
        before = self._served(num_fit, usable, hosts[0])[:, None]
        return before - self._served(num_after, usable_after, hosts[1])

    def lost_by_group(
        self, free: Array, kind: Array, hosts: tuple[Host, Host], taken: Array
    ) -> Array:
        """U before - U after ``taken`` bytes ``[R, W]`` are used of each row, ``[R]``."""
        left = free - taken
        lost = (self.alone(free, kind) - self.alone(left, kind)).sum(1)
        if not self.num_others:
            return lost
        for sign, now, host in ((1, free, hosts[0]), (-1, left, hosts[1])):
            fits = self._fits(now, kind)
            usable = (fits * now[:, :, None]).sum(1)
            lost = lost + sign * self._served(fits.sum(1), usable, host)
        return lost

    def _served(self, num_fit: Array, usable: Array, host: Host) -> Array:
        """Usable bytes times weight of the others, over the last axis: of those whose devices are
        many enough and whose node can feed them."""
        hosted = (host.cpu_milli[:, None] >= self.cpu) & (host.memory[:, None] >= self.memory)
        if usable.ndim == 3:
            hosted = hosted[:, None, :]
        return (((num_fit >= self.num) & hosted) * usable * self.weight).sum(-1)

    def _fits(self, free: Array, kind: Array) -> Array:
        """Whether a device can hold a share of each of the others, ``[R, W, K]``; what is absent
        has no free memory."""
        return (free[:, :, None] >= np.maximum(self.size, 1)) & self.allowed[kind]


def _is_simple(shape: Shape) -> bool:
    return shape.num_devices == 1 and not shape.cpu_milli and not shape.host_memory


def _with_wholes(weights: dict[Shape, int], wholes: Counter[Shape]) -> dict[Shape, int]:
    """The commonest kinds of nodes as well; each at least once."""
    total, num_nodes = sum(weights.values()), wholes.total()
    kept = sorted(wholes, key=lambda one: (-wholes[one], one))[:MAX_WHOLES]
    more = {one: max(1, total * wholes[one] // (WHOLE_SHARE * num_nodes)) for one in kept}
    return {one: weights.get(one, 0) + more.get(one, 0) for one in (*weights, *more)}


def _merged(wanted: dict[Shape, int]) -> dict[Shape, int]:
    """At most ``MAX_SHAPES``, those that want most memory together; the others are counted with the
    next larger one of as many devices (or left out, if there is none)."""

    def memory(one: Shape) -> int:
        return wanted[one] * one.num_devices * one.shard_bytes

    kept = sorted(wanted, key=lambda one: (-memory(one), one))[:MAX_SHAPES]
    merged = {one: wanted[one] for one in kept}
    for shape in sorted(wanted.keys() - merged.keys()):
        larger = [
            one
            for one in kept
            if (one.num_devices, one.gpu_classes) == (shape.num_devices, shape.gpu_classes)
            and one.shard_bytes >= shape.shard_bytes
        ]
        if larger:
            merged[min(larger, key=lambda one: (one.shard_bytes, one))] += wanted[shape]
    return merged
