"""A node's memory under a trace of requests: how often the model asked for is there already.

Each policy holds models in ``room`` (in models of one size), loads what is asked for and absent,
and may load ahead. A request is *warm* if its model is in memory or on its way there. Its added
wait is what remains of the load. A load ahead that leaves before it was asked for is *wasted*.

Worked example, room for one, loads of 3 s, no loading ahead::

    0 s a    cold, waits 3 s
    1 s a    warm (on its way), waits 2 s
    9 s b    cold, waits 3 s; a leaves
    9 s a    cold, waits 3 s; b leaves
    warm-hit rate 1/4, loads 3

Execution takes no time here, so nothing is ever busy. The policies are in ``policies``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from controlplane.placement.preload import MARGIN, Memory, Terms, swaps, terms_of, victims

FREE = Terms(0.0, 0.0)  # a load ahead costs nothing

LOOK_AGAIN_S = (
    5.0,
    20.0,
    60.0,
    180.0,
    600.0,
)  # after the last request: rates fade at their own speed


class Request(NamedTuple):
    """``at`` in seconds since the epoch."""

    at: float
    model: str


class Policy(Protocol):
    """``keep`` scores every model, the higher the better; ``loads_ahead`` by the same scores."""

    loads_ahead: bool

    def note(self, index: int, request: Request) -> None: ...

    def keep(self, at: float) -> Mapping[str, float]: ...


@dataclass(slots=True)
class Residency:
    """A model in memory."""

    since: float
    ready_at: float
    ahead: bool
    used: bool = False


class Served(NamedTuple):
    """What became of one request."""

    at: float
    is_warm: bool
    wait_s: float


@dataclass(slots=True)
class Outcome:
    """``num_ahead`` of the loads were made before anybody asked; times in seconds."""

    served: list[Served] = field(default_factory=list)
    num_loads: int = 0
    num_ahead: int = 0
    wasted_s: float = 0.0

    @property
    def num_cold(self) -> int:
        return sum(not one.is_warm for one in self.served)

    def hit_rate(self, since: float = 0.0) -> float:
        """Of the requests from ``since`` on."""
        warm = [one.is_warm for one in self.served if one.at >= since]
        return sum(warm) / len(warm) if warm else 0.0

    def wait_s(self, share: float) -> float:
        """The added wait that ``share`` of the requests do not pass."""
        ordered = sorted(one.wait_s for one in self.served)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class Node:
    room: int
    load_s: float
    margin: float = MARGIN
    terms: Terms = FREE
    resident: dict[str, Residency] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)

    def serve(self, request: Request, keep: Mapping[str, float]) -> None:
        at, model = request
        is_warm = model in self.resident
        if not is_warm:
            self._load(model, victims(self._memory(model), model, keep) or (), at, ahead=False)
        held = self.resident[model]
        held.used = True
        self.outcome.served.append(Served(at, is_warm, max(0.0, held.ready_at - at)))

    def load_ahead(self, keep: Mapping[str, float], at: float) -> None:
        stay = [one for one, held in self.resident.items() if at - held.since < self.terms.stay_s]
        memory = replace(self._memory(*keep), busy=stay)
        for swap in swaps(memory, keep, self.margin, self.terms.price):
            self._load(swap.model, swap.evicted, at, ahead=True)

    def _memory(self, *others: str) -> Memory:
        sizes = dict.fromkeys((*self.resident, *others), 1.0)
        return Memory(self.room, sizes, tuple(self.resident))

    def _load(self, model: str, evicted: Sequence[str], at: float, *, ahead: bool) -> None:
        for one in evicted:
            gone = self.resident.pop(one)
            if gone.ahead and not gone.used:
                self.outcome.wasted_s += at - gone.since
        self.resident[model] = Residency(at, at + self.load_s, ahead)
        self.outcome.num_loads += 1
        self.outcome.num_ahead += ahead


def replay(
    requests: Sequence[Request],
    policy: Policy,
    rooms: Sequence[int],
    load_s: float,
    margin: float = MARGIN,
    is_priced: bool = True,
) -> dict[int, Outcome]:
    """One outcome for each of ``rooms``; not ``is_priced``: the margin alone decides on loads."""
    nodes = [Node(room, load_s, margin, terms_of(room) if is_priced else FREE) for room in rooms]
    previous = requests[0].at if requests else 0.0
    for index, request in enumerate(requests):
        if policy.loads_ahead:
            _look_again(nodes, policy, previous, request.at)
        policy.note(index, request)
        keep = policy.keep(request.at)
        for node in nodes:
            node.serve(request, keep)
            if policy.loads_ahead:
                node.load_ahead(keep, request.at)
        previous = request.at
    return {node.room: node.outcome for node in nodes}


def _look_again(nodes: Sequence[Node], policy: Policy, previous: float, until: float) -> None:
    for at in _looks(previous, until):
        keep = policy.keep(at)
        for node in nodes:
            node.load_ahead(keep, at)


def _looks(previous: float, until: float) -> Iterator[float]:
    """Between two requests."""
    for passed in LOOK_AGAIN_S:
        if previous + passed >= until:
            return
        yield previous + passed
