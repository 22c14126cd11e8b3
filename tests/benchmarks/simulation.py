"""A simulated week of 48 GPUs and 200 models, next to static batching and to one model per GPU.

    python -m tests.benchmarks.simulation --trace PATH [--sample 60] [--json FILE]

The trace is Azure's LLM conversation trace of 2023 (an hour of a chat service: TIMESTAMP,
ContextTokens, GeneratedTokens), laid end to end under a day's and a week's profile
(``simulation.arrivals``) at 18.1 requests a second in the mean: 47 million a month, 11 million in
the week. Popularity is Zipf's (1 / n), nodes fail at random (mean 168 h between failures of a node,
2 h away). One of ``--sample`` five-minute stretches is simulated, each request of it, and all of
the time around losses and returns; sums are weighted by what a stretch stands for
(``simulation.sampling``; ``tests/simulation/test_sampling.py`` compares a day in full with samples
of it). Batches run in coarse steps (``simulation.coarse``, tested against the real scheduler).

``throughput_vs_static`` is of one node of 8 H100 with more asked for than it can do, as in the
paper; the week itself asks for less than the fleet can do under either. Every line is simulated: no
GPU was measured, and performance is a roofline with assumed efficiencies (``simulation.hardware``).
"""

import argparse
import gzip
import json
import platform
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from controlplane.application.scenario_file import parse
from controlplane.simulation.arrivals import Lengths, read_lengths
from controlplane.simulation.fleet import Fleet
from controlplane.simulation.scenario import Scenario

SCENARIOS = Path(__file__).resolve().parents[2] / "deploy" / "scenarios"
SAMPLE = 60
POLICIES = {
    "ours": {},
    "static": {"batching": "static"},
    "one_per_gpu": {"sharing": "one_model_per_gpu"},
}
SHOWN = (
    "availability", "utilisation", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s",
    "models_per_gpu", "tokens_per_s", "cold_starts", "movements", "node_losses",
    "requests_simulated", "requests_stood_for", "wall_s",
)  # fmt: skip
AVAILABILITY_BAR = 0.999
PAPERS = (  # SPEC section 10: what the papers say, and which of our figures stands beside it
    ("continuous over static, tok/s", "3.2x (4,200 -> 13,400)", "throughput_vs_static"),
    ("TTFT p50", "52 -> 45 ms", "ttft_p50_s"),
    ("TTFT p99", "280 -> 120 ms", "ttft_p99_s"),
    ("fleet TTFT p50", "85 -> 31 ms", "ttft_p50_s"),
    ("fleet TTFT p99", "520 -> 178 ms", "ttft_p99_s"),
    ("GPU utilisation", "42 -> 87 %, fleet 94 %", "utilisation"),
    ("models per GPU", "1.0 -> 3.2", "models_per_gpu"),
    ("fleet", "200+ models, 48 GPUs, 99.9 %", "availability"),
)
Figures = dict[str, float]


def scenario_of(name: str) -> Scenario:
    return parse((SCENARIOS / f"{name}.yaml").read_text())


def simulated(scenario: Scenario, trace: Lengths | None) -> Figures:
    """Figures of one run, and how long it took."""
    begin = time.perf_counter()
    found = Fleet(scenario, trace).run().figures()
    return {**found, "wall_s": time.perf_counter() - begin}


def week(trace: Lengths | None, sample: int, seconds: float | None) -> dict[str, Figures]:
    """By policy."""
    base = replace(scenario_of("week"), sample=sample)
    base = replace(base, seconds=seconds) if seconds else base
    found = {}
    for name, changes in POLICIES.items():
        found[name] = simulated(replace(base, **changes), trace)
        told = " ".join(f"{key}={value:.5g}" for key, value in found[name].items())
        print(f"simulated  {name}: {told}", flush=True)
    return found


def node8(trace: Lengths | None) -> dict[str, Figures]:
    """One node of 8 H100 beyond what it can do, by batching."""
    base = scenario_of("node8")
    return {one: simulated(replace(base, batching=one), trace) for one in ("continuous", "static")}


# --- the report -------------------------------------------------------------------------------
def report(trace: Lengths | None, sample: int, seconds: float | None) -> dict[str, Any]:
    by_policy, by_batching = week(trace, sample, seconds), node8(trace)
    ours, static, alone = (by_policy[name] for name in POLICIES)
    full, waiting = by_batching["continuous"], by_batching["static"]
    ratios = {
        "availability": ours["availability"],
        "throughput_vs_static": full["tokens_per_s"] / waiting["tokens_per_s"],
        "ttft_p50_vs_static": ours["ttft_p50_s"] / static["ttft_p50_s"],
        "ttft_p99_vs_static": ours["ttft_p99_s"] / static["ttft_p99_s"],
        "models_per_gpu_vs_one": ours["models_per_gpu"] / alone["models_per_gpu"],
        "availability_vs_one_per_gpu": ours["availability"] / alone["availability"],
    }
    figures = {f"{name}_{key}": one[key] for name, one in by_policy.items() for key in SHOWN}
    figures |= {
        f"node8_{name}_tokens_per_s": one["tokens_per_s"] for name, one in by_batching.items()
    }
    for line in (*_table(by_policy), *_papers(by_policy, ratios, by_batching)):
        print(f"simulated  {line}")
    return {
        "name": "simulation",
        "machine": f"{platform.machine()}, everything simulated, 1 of {sample} stretches",
        "ratios": ratios,
        "figures": figures,
    }


def _table(by_policy: dict[str, Figures]) -> list[str]:
    lines = [f"{'':<20}" + "".join(f"{name:>14}" for name in by_policy)]
    for key in SHOWN:
        lines.append(f"{key:<20}" + "".join(f"{one[key]:>14.5g}" for one in by_policy.values()))
    is_met = by_policy["ours"]["availability"] >= AVAILABILITY_BAR
    return [*lines, f"availability bar {AVAILABILITY_BAR}: {'met' if is_met else 'NOT met'}"]


def _papers(
    by_policy: dict[str, Figures], ratios: Figures, by_batching: dict[str, Figures]
) -> list[str]:
    """Each line of the papers' table with what stands beside it here."""
    lines = [f"{'figure':<32}{'papers':<32}{'static or one per GPU -> ours':<30}"]
    for title, paper, key in PAPERS:
        if key in ratios and key != "availability":
            full, static = (by_batching[name]["tokens_per_s"] for name in ("continuous", "static"))
            here = f"{ratios[key]:.2f}x ({static:,.0f} -> {full:,.0f}), 8 x H100"
        else:
            before = "one_per_gpu" if key in ("models_per_gpu", "availability") else "static"
            unit = " s" if key.endswith("_s") else ""
            here = f"{by_policy[before][key]:.4g} -> {by_policy['ours'][key]:.4g}{unit}"
        lines.append(f"{title:<32}{paper:<32}{here:<30}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, help="CSV, gzipped or not; none: drawn lengths")
    parser.add_argument("--sample", type=int, default=SAMPLE)
    parser.add_argument("--seconds", type=float, help="of the week, from its beginning")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace = None
    if options.trace:
        with (gzip.open if options.trace.suffix == ".gz" else open)(options.trace, "rt") as file:
            trace = read_lengths(file.read())
    found = report(trace, options.sample, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
