"""Replicas under a square wave and under a steady load, on a simulated node, as plots.

    python -m tests.benchmarks.autoscaling --out DIR

The rule is the product's (``placement.autoscale``), the node ``simulation.autoscaling``'s: 8 slots,
12 s a request, 20 s to load, so one replica does 40 requests a minute. Figures: how much less the
replicas cost than the most there ever are, which share of requests finds a slot at once, changes.
"""

import argparse
import json
import platform
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from controlplane.simulation.autoscaling import Node, Step, scale

NODE = Node(num_slots=8, service_s=12.0, load_s=20.0, seed=1)
LOW, HIGH, SECONDS = 0, 8, 7200
LOADS: dict[str, Callable[[float], float]] = {
    "square_wave": lambda at: 160.0 if at % 3600 < 1800 else 20.0,
    "steady": lambda at: 100.0,
}
WIDTH, HEIGHT, LEFT, PANEL = 760, 330, 52, 80
PANELS: tuple[tuple[str, str, Callable[[Step], float]], ...] = (
    ("requests a minute", "#4263eb", lambda step: step.rate),
    ("replicas (ready: filled)", "#2f9e44", lambda step: float(step.num)),
    ("requests waiting", "#e8590c", lambda step: float(step.num_waiting)),
)


def figures(steps: list[Step]) -> dict[str, float]:
    most = max(step.num for step in steps)
    changes = sum(a.num != b.num for a, b in pairwise(steps))
    used = sum(step.num for step in steps)
    settled = steps[len(steps) // 2 :]
    return {
        "most_replicas": most,
        "share_of_always_most": used / (most * len(steps)),
        "changes": changes,
        "changes_in_last_half": sum(a.num != b.num for a, b in pairwise(settled)),
        "seconds_with_waiting": sum(step.num_waiting > 0 for step in steps),
        "most_waiting": max(step.num_waiting for step in steps),
    }


def plot(title: str, steps: list[Step]) -> str:
    """SVG, three panels over one axis of minutes."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{title}</text>',
    ]
    for index, (label, colour, value) in enumerate(PANELS):
        top = 38 + index * (PANEL + 14)
        parts += _panel(label, colour, [value(step) for step in steps], top)
        if index == 1:
            parts.append(_area([float(step.num_ready) for step in steps],
                               max(step.num for step in steps), top, colour))  # fmt: skip
    minutes = len(steps) // 60
    for minute in range(0, minutes + 1, 20):
        x = LEFT + (WIDTH - LEFT - 12) * minute / minutes
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{minute} min</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(label: str, colour: str, values: list[float], top: int) -> list[str]:
    high = max(max(values), 1.0)
    path = " ".join(_points(values, high, top))
    right = WIDTH - 12
    return [
        f'<text x="{LEFT}" y="{top - 4}" fill="{colour}">{label}</text>',
        f'<text x="{LEFT - 6}" y="{top + 9}" text-anchor="end">{high:.0f}</text>',
        f'<text x="{LEFT - 6}" y="{top + PANEL}" text-anchor="end">0</text>',
        f'<path d="M{LEFT} {top}V{top + PANEL}H{right}" fill="none" stroke="#adb5bd"/>',
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
    ]


def _area(values: list[float], high: float, top: int, colour: str) -> str:
    points = _points(values, high, top)
    first, last = points[0].split(",")[0], points[-1].split(",")[0]
    base = top + PANEL
    path = " ".join([f"{first},{base}", *points, f"{last},{base}"])
    return f'<polygon points="{path}" fill="{colour}" fill-opacity="0.18"/>'


def _points(values: list[float], high: float, top: int) -> list[str]:
    """Corners only: a run of equal values is its first and its last point."""
    last, found = len(values) - 1, []
    for i, value in enumerate(values):
        if 0 < i < last and values[i - 1] == value == values[i + 1]:
            continue
        x = LEFT + (WIDTH - LEFT - 12) * i / last
        found.append(f"{x:.1f},{top + PANEL * (1 - value / high):.1f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the plots")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for name, rate in LOADS.items():
        steps = list(scale(rate, SECONDS, NODE, LOW, HIGH))
        found[name] = figures(steps)
        title = f"{name.replace('_', ' ')}: 8 slots a replica, 12 s a request, 20 s to load"
        (options.out / f"autoscaling_{name}.svg").write_text(plot(title, steps))
        print(name, " ".join(f"{key}={value:g}" for key, value in found[name].items()))
    if options.json:
        ratios = {f"{name}_share_of_always_most": one["share_of_always_most"]
                  for name, one in found.items()}  # fmt: skip
        body = {"name": "autoscaling", "machine": platform.platform(), "ratios": ratios,
                "figures": found}  # fmt: skip
        options.json.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
