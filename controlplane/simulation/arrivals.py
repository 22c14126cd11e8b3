"""When requests come, and how long they are: a trace tiled over time, or drawn.

The rate of the moment is the mean times a day's and a week's profile, normalised to a mean of 1
over a week: ``1 + day * cos`` with its top at 15:00 UTC, and ``weekend`` on Saturdays and Sundays.
A trace lends its order: the gaps between its requests, and each one's prompt and output. It is laid
end to end as often as needed and stretched so that its mean rate is that of the moment, beginning
at a place drawn for each stretch of time. Worked example, a trace of 3 requests at 0, 1 and 5 s,
which is 7.5 s long with the gap to its next beginning, so 0.4 a second; wanted are 2 a second, that
is 0.2 s for each second of the trace, here from its 4th second on::

    trace    4 s | 5 s c | 7.5 s a  8.5 s b  12.5 s c | 15 s a …
    comes        0.2 c     0.7 a    0.9 b    1.7 c      2.2 a

Without a trace gaps are exponential and lengths log-normal. Which model, tenant and class is drawn
for each request by their shares, independently.
"""

import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from controlplane.simulation.jobs import Job
from controlplane.simulation.sampling import Window
from controlplane.simulation.scenario import Arrivals, Scenario
from controlplane.simulation.trace import BadTrace

Floats: TypeAlias = NDArray[np.float64]
TOP_HOUR = 15.0
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Lengths(NamedTuple):
    """A trace: ``at`` in seconds from its beginning, ascending; ``seconds``: of all of it."""

    at: Floats
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    seconds: float


def read_lengths(text: str) -> Lengths:
    """CSV with TIMESTAMP, ContextTokens, GeneratedTokens (as Azure's LLM traces); BadTrace."""
    rows = csv.DictReader(io.StringIO(text))
    missing = [one for one in _COLUMNS if one not in (rows.fieldnames or ())]
    if missing:
        raise BadTrace(f"The trace has no column {' and no column '.join(missing)}.")
    found = sorted(_row(number, row) for number, row in enumerate(rows, start=2))
    if len(found) < 2 or found[-1][0] <= found[0][0]:
        raise BadTrace("The trace needs at least two requests at different times.")
    table = np.array(found)
    at = table[:, 0] - table[0, 0]
    seconds = float(at[-1]) * len(at) / (len(at) - 1)  # and a gap to the next one's beginning
    return Lengths(at, table[:, 1].astype(np.int64), table[:, 2].astype(np.int64), seconds)


def _row(number: int, row: dict[str, str]) -> tuple[float, int, int]:
    try:
        told = datetime.fromisoformat(row["TIMESTAMP"][:26])
        prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    except (TypeError, ValueError) as error:
        raise BadTrace(f"Line {number} of the trace is no request: {row}.") from error
    if prompt < 0 or output < 0:
        raise BadTrace(f"Line {number} of the trace has fewer than 0 tokens.")
    at = (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
    return at, max(1, prompt), max(1, output)


def profile(wanted: Arrivals, at: Floats) -> Floats:
    """The rate at these times (Unix seconds) over the week's mean."""
    days = at / 86400.0
    hours = (days % 1.0) * 24.0
    daily = 1 + wanted.day * np.cos((hours - TOP_HOUR) / 24.0 * 2 * np.pi)
    is_weekend = (np.floor(days) + 3) % 7 >= 5  # 1970 began on a Thursday; Monday is 0
    mean = (5 + 2 * wanted.weekend) / 7
    return np.asarray(daily * np.where(is_weekend, wanted.weekend, 1.0) / mean)


def arrivals(
    scenario: Scenario, window: Window, trace: Lengths | None, chance: np.random.Generator
) -> Iterator[Job]:
    """The requests of one stretch, in order; ``at`` is in the simulation's time."""
    times = _times(scenario, window, trace, chance)
    wanted, number = scenario.arrivals, len(times[0])
    models = _drawn([one.share for one in scenario.entries()], number, chance)
    tenants = _drawn([one.share for one in scenario.tenants], number, chance)
    names = list(wanted.classes)
    classes = _drawn(list(wanted.classes.values()), number, chance)
    at, prompts, outputs = times
    prompts, outputs = (
        np.clip(prompts, 1, wanted.max_prompt),
        np.clip(outputs, 1, wanted.max_output),
    )
    columns = (at, models, classes, tenants, prompts, outputs)
    for when, model, kind, tenant, prompt, output in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        yield Job(0, when, model, names[kind], tenant, prompt, output, window.weight)


def _drawn(shares: list[float], number: int, chance: np.random.Generator) -> NDArray[np.int64]:
    edges = np.cumsum(shares) / np.sum(shares)
    return np.searchsorted(edges, chance.random(number), side="right").clip(0, len(shares) - 1)


def _times(
    scenario: Scenario, window: Window, trace: Lengths | None, chance: np.random.Generator
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Times of the simulation, prompts and outputs."""
    knots = np.linspace(0.0, window.seconds, max(2, int(window.seconds / 60) + 1))
    rates = scenario.arrivals.per_second * profile(
        scenario.arrivals, scenario.start + window.wall + knots
    )
    areas = np.diff(knots) * (rates[1:] + rates[:-1]) / 2
    expected = np.concatenate(([0.0], np.cumsum(areas)))  # requests by the time of the knot
    if trace is None:
        order, prompts, outputs = _without_trace(scenario.arrivals, expected[-1], chance)
    else:
        order, prompts, outputs = _from_trace(trace, expected[-1], chance)
    return window.at + np.interp(order, expected, knots), prompts, outputs


def _without_trace(
    wanted: Arrivals, expected: float, chance: np.random.Generator
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    number = int(chance.poisson(expected))
    order = np.sort(chance.random(number)) * expected
    prompts = chance.lognormal(np.log(wanted.prompt_median), wanted.prompt_spread, number)
    outputs = chance.lognormal(np.log(wanted.output_median), wanted.output_spread, number)
    return order, prompts.astype(np.int64), outputs.astype(np.int64)


def _from_trace(
    trace: Lengths, expected: float, chance: np.random.Generator
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """``order``: as many as are expected by then, in the trace's own rhythm."""
    rate = len(trace.at) / trace.seconds
    begin = chance.random() * trace.seconds
    num_tiles = int((begin + expected / rate) / trace.seconds) + 1
    tiles = np.arange(num_tiles) * trace.seconds
    at = (tiles[:, None] + trace.at[None, :]).ravel() - begin
    taken = (at >= 0) & (at * rate < expected)
    prompts, outputs = np.tile(trace.prompt, num_tiles), np.tile(trace.output, num_tiles)
    return at[taken] * rate, prompts[taken], outputs[taken]
