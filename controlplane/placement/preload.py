"""Which models to load ahead of their requests, and which to let go for them.

A model that is absent but likelier to be asked for than what would have to leave is loaded, and the
likeliest to stay idle leave for it. ``MARGIN`` keeps two models of nearly one rate from pushing
each other out again and again. A load also has a **price**, as a share of all that is asked for: it
takes bandwidth, and seconds until the model is ready, so what it gains must exceed that. What was
just loaded stays for a while, or it would leave in the seconds in which its user reads the answer.
Where memory has few places that is too long a time to give one away, and only the price counts::

    4 places    price 2 %        nothing stays for the sake of it
    8 places    price 0.125 %    what was loaded stays for 30 s

Found on ten days of a trace (``tests.benchmarks.preloading``): three in ten loads fewer than with
the margin alone, and as many requests that find their model there.

Worked example, room for 10, a and b resident, c absent, margin 1.05::

    model   size   rate
    a       6      0.5
    b       4      0.1      the idlest: leaves first
    c       4      0.4      0.4 > 1.05 · 0.1: load c, evict b
    c       5      0.4      b's 4 are not enough, a's 6 are: 0.4 < 1.05 · 0.5, nothing moves

What is busy is never evicted. Rates only rank (``demand``); sizes and room are in one unit. The
controller asks the same question (``pays``) of a whole fleet: see ``ahead``.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

MARGIN = 1.05
FEW_PLACES = 6


@dataclass(frozen=True, slots=True)
class Terms:
    """What a load ahead must be worth. ``price``: of the sum of all rates; ``stay_s``: how long
    nothing is evicted for another's sake after it was loaded."""

    price: float
    stay_s: float


SCARCE, ROOMY = Terms(0.02, 0.0), Terms(0.00125, 30.0)


def terms_of(num_places: float) -> Terms:
    """By how many models there is room for."""
    return SCARCE if num_places < FEW_PLACES else ROOMY


def pays(
    rate: float,
    leaving: Collection[str],
    rates: Mapping[str, float],
    price: float,
    margin: float = MARGIN,
) -> bool:
    """Whether a model of this rate is worth its load, and the loads that its room will cost those
    who leave for it. ``rates`` are of all that come and go::

        pays(0.4, ["b"], {"a": 0.5, "b": 0.1, "c": 0.4}, 0.02)    0.4 > 1.05 · 0.1 + 0.02 · 1.0
    """
    lost = sum(max(0.0, rates.get(one, 0.0)) for one in leaving)
    return rate > margin * lost + price * sum(max(0.0, one) for one in rates.values())


@dataclass(frozen=True, slots=True)
class Swap:
    """Load ``model``; ``evicted`` leave for it, the idlest first."""

    model: str
    evicted: tuple[str, ...]
    rate: float
    evicted_rate: float

    @property
    def reason(self) -> str:
        for_it = f", in the place of {', '.join(self.evicted)} " if self.evicted else " "
        return (
            f"{self.model} is expected to be asked for sooner ({self.rate:.2g} a minute){for_it}"
            f"({self.evicted_rate:.2g} a minute)."
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """What is resident in ``room``; ``sizes`` of every model, resident or not."""

    room: float
    sizes: Mapping[str, float]
    resident: Collection[str]
    busy: Collection[str] = ()

    @property
    def free(self) -> float:
        return self.room - sum(self.sizes[model] for model in self.resident)


def victims(memory: Memory, model: str, keep: Mapping[str, float]) -> tuple[str, ...] | None:
    """Who leaves so that ``model`` fits, least to ``keep`` first, and nobody whose going is no
    help; None if not even all that are idle make room."""
    missing = memory.sizes[model] - memory.free
    leaving: list[str] = []
    idle = [one for one in memory.resident if one not in memory.busy]
    for candidate in sorted(idle, key=lambda one: (keep.get(one, 0.0), one)):
        if missing <= 0:
            break
        leaving.append(candidate)
        missing -= memory.sizes[candidate]
    if missing > 0:
        return None
    for candidate in leaving[:-1]:
        if missing + memory.sizes[candidate] <= 0:
            leaving.remove(candidate)
            missing += memory.sizes[candidate]
    return tuple(leaving)


def swaps(
    memory: Memory, rates: Mapping[str, float], margin: float = MARGIN, price: float = 0.0
) -> Iterator[Swap]:
    """The loads that pay, best first; ``memory`` as it is when the first of them is asked for."""
    resident = set(memory.resident)
    absent = [model for model, rate in rates.items() if rate > 0 and model not in resident]
    for model in sorted(absent, key=lambda one: (-rates[one], one)):
        now = Memory(memory.room, memory.sizes, resident, memory.busy)
        leaving = victims(now, model, rates)
        if leaving is None:
            continue
        if not pays(rates[model], leaving, rates, price, margin):
            if len(leaving) == 1 and now.free <= 0:  # no later one, asked for less, can pay either
                return
            continue
        resident = (resident - set(leaving)) | {model}
        lost = sum(max(0.0, rates.get(one, 0.0)) for one in leaving)
        yield Swap(model, leaving, rates[model], lost)
