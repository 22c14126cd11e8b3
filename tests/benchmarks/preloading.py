"""Loading ahead, on a trace: ``python -m tests.benchmarks.preloading --trace PATH [--fit]``.

For a memory that holds K models, the warm-hit rate of LRU, of the averages alone (``ema``), of
averages and ARIMA (``ema_arima``), of these and what follows what and the time of day (``demand``,
the product's), and of the clairvoyant optimum among policies that load on demand.
``distance_closed_kK`` is the part of the way from LRU to that optimum that ``demand`` goes,
``forecast_vs_ema_kK`` is ema_arima's distance over ema's. Everything is replayed on the whole
trace; ``test_*`` are the last three days alone, which took no part in choosing the weights.

``--fit`` finds the weights that ``controlplane.placement.weights`` holds: the maximum of the
likelihood of which model comes next, over all but the last three days.
"""

import argparse
import gzip
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from controlplane.adapters.forecasting import History
from controlplane.placement.demand import FOLLOWING_S, RECENT_S, Demand, Weights
from controlplane.simulation.policies import Outcomes, compare, distance_closed, table
from controlplane.simulation.residency import Request
from controlplane.simulation.trace import read

ROOMS = (4, 8, 16)
TEST_DAYS = 3
DAY_S = 86_400
LOAD_S = 2.7  # the median of the trace's system
NUM_WARM_UP = 300


def load(path: Path) -> list[Request]:
    data = path.read_bytes()
    return read((gzip.decompress(data) if path.suffix == ".gz" else data).decode())


def first_test_second(requests: Sequence[Request]) -> float:
    """Midnight before the last three calendar days."""
    return (requests[-1].at // DAY_S - TEST_DAYS + 1) * DAY_S


def figures(outcomes: Outcomes, prefix: str, since: float) -> dict[str, float]:
    found = {}
    for name, by_room in outcomes.items():
        for room, outcome in by_room.items():
            found[f"{prefix}{name}_hit_rate_k{room}"] = outcome.hit_rate(since)
    for room in ROOMS:
        closed = {name: distance_closed(outcomes, name, room, since) for name in outcomes}
        found[f"{prefix}distance_closed_k{room}"] = closed["demand"]
        found[f"{prefix}forecast_vs_ema_k{room}"] = closed["ema_arima"] / closed["ema"]
        found[f"{prefix}demand_vs_ema_k{room}"] = closed["demand"] / closed["ema"]
    average = [found[f"{prefix}distance_closed_k{room}"] for room in ROOMS]
    return found | {f"{prefix}distance_closed": sum(average) / len(ROOMS)}


# --- finding the weights ------------------------------------------------------------------------
def design(requests: Sequence[Request], history: History) -> tuple[Any, Any]:
    """Terms of every known model at each request, shape ``[requests, models, terms]``, and which
    model it was; requests for a model never seen before are left out."""
    models = {name: i for i, name in enumerate(dict.fromkeys(one.model for one in requests))}
    demand, rows, targets = Demand(), [], []
    num_terms = len(RECENT_S) + len(FOLLOWING_S) + 2
    for number, (at, model) in enumerate(requests):
        terms = demand.terms(at, history.at(at))
        if model in terms and number >= NUM_WARM_UP:
            row = np.zeros((len(models), num_terms))
            for name, values in terms.items():
                row[models[name]] = values
            rows.append(row)
            targets.append(models[model])
        demand.note(model, at)
    return np.array(rows), np.array(targets)


def fit(terms: Any, targets: Any, columns: Sequence[int]) -> Any:
    """Weights of ``columns``, largest likelihood of Π rate[target] / Σ rate; scaled to a mean
    total rate of one."""
    chosen = terms[:, :, columns]
    scale = chosen.mean((0, 1)) + 1e-12
    chosen = chosen / scale
    rows = np.arange(len(targets))

    def loss(weights: Any) -> tuple[float, Any]:
        raw = chosen @ weights
        positive = raw > 1e-3
        rates = np.where(positive, raw, 1e-3)
        total, own = rates.sum(1), rates[rows, targets]
        slope = np.broadcast_to((1 / total)[:, None], rates.shape).copy()
        slope[rows, targets] -= 1 / own
        slope *= positive
        excess = weights.sum() - len(columns)  # rates have no scale: hold them near one
        value = (np.log(total) - np.log(own)).mean() + 1e-3 * excess**2 + 1e-4 * weights @ weights
        gradient = np.einsum("nm,nmp->p", slope, chosen) / len(rows)
        return value, gradient + 2e-3 * excess + 2e-4 * weights

    found = minimize(loss, np.ones(len(columns)), jac=True, method="L-BFGS-B")
    weights = found.x / scale
    return weights / np.abs(weights).max(), found.fun


def print_weights(requests: Sequence[Request], history: History) -> None:
    terms, targets = design(requests, history)
    num_recent, num_terms = len(RECENT_S), terms.shape[2]
    recent = list(range(num_recent))
    for name, columns in (
        ("AVERAGES", recent),
        ("AVERAGES_AND_FORECAST", [*recent, num_terms - 1]),
        ("FITTED", list(range(num_terms))),
    ):
        weights, loss = fit(terms, targets, columns)
        every = np.zeros(num_terms)
        every[columns] = weights
        one = Weights(
            tuple(every[:num_recent]),
            every[num_recent],
            tuple(every[num_recent + 1 : -1]),
            every[-1],
        )
        rounded = [round(float(value), 4) for value in one.flat()]
        print(f"{name}: {rounded}  (loss {loss:.4f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--fit", action="store_true", help="find the weights, and stop")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    requests, started = load(options.trace), time.perf_counter()
    since = first_test_second(requests)
    if options.fit:
        known = [one for one in requests if one.at < since]
        print_weights(known, History(known))
        return
    history = History(requests)
    outcomes = compare(requests, history, ROOMS, LOAD_S)
    print(f"{len(requests)} requests", *table(outcomes), sep="\n")
    ratios = figures(outcomes, "", 0.0) | figures(outcomes, "test_", since)
    report = {
        "name": "preloading",
        "machine": f"{platform.machine()}, {time.perf_counter() - started:.0f} s",
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
    }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
