"""Small scenarios, and runs of them with every job kept."""

from dataclasses import astuple, dataclass
from typing import Any

from controlplane.simulation.fleet import Fleet
from controlplane.simulation.jobs import Job
from controlplane.simulation.outcome import Outcome
from controlplane.simulation.scenario import (
    Arrivals,
    Failures,
    ModelEntry,
    NodeGroup,
    Outage,
    Scenario,
    Tenant,
)

CLASSES = {"realtime": 0.3, "standard": 0.5, "batch": 0.2}


def small(**changes: Any) -> Scenario:
    """Three nodes of two GPUs, four models, one loss; ten minutes, coarse."""
    plain: dict[str, Any] = dict(
        name="small",
        seconds=600.0,
        mode="coarse",
        nodes=(NodeGroup("h", "h100-80gb", 2, 2), NodeGroup("a", "a100-80gb", 1, 2)),
        models=(
            ModelEntry("chat", "8b", 6.0, 2, 4, "high"),
            ModelEntry("code", "14b", 2.0),
            ModelEntry("draw", "3b", 1.0, priority="best-effort"),
            ModelEntry("rare", "1b", 0.1, 0, 1, "best-effort"),
        ),
        tenants=(Tenant("acme", "premium", 3.0), Tenant("free", "free", 1.0)),
        arrivals=Arrivals(per_second=2.0, classes=CLASSES),
        failures=Failures(schedule=(Outage("h-1", 200.0, 200.0),)),
    )
    return Scenario(**(plain | changes))


@dataclass
class Ran:
    fleet: Fleet
    outcome: Outcome
    jobs: list[Job]

    def told(self) -> list[tuple[Any, ...]]:
        """Everything about every job, in the order of their ends."""
        return [astuple(job) for job in self.jobs]


def ran(scenario: Scenario) -> Ran:
    jobs: list[Job] = []
    fleet = Fleet(scenario, on_end=jobs.append)
    return Ran(fleet, fleet.run(), jobs)
