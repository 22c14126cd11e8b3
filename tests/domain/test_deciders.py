"""What every aggregate promises, whatever its log holds."""

from functools import reduce
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args

import pytest

from controlplane import domain
from controlplane.domain import (
    model,
    node,
    placement,
    retention,
    route,
    routing,
    scaling,
    tenant,
)
from tests.domain.samples import SAMPLES
from tests.projections.history import random_history

EVENTS = {
    model: model.ModelEvent,
    node: node.NodeEvent,
    placement: placement.PlacementEvent,
    retention: retention.RetentionEvent,
    route: route.RouteEvent,
    routing: routing.RoutingEvent,
    scaling: scaling.ScalingEvent,
    tenant: tenant.TenantEvent,
}


def test_every_aggregate_is_here() -> None:
    names = [one.name for one in iter_modules(domain.__path__, f"{domain.__name__}.")]
    assert {one for one in map(import_module, names) if hasattr(one, "DECIDER")} == set(EVENTS)


@pytest.mark.parametrize("module", EVENTS, ids=lambda module: module.DECIDER.category)
def test_evolve_never_raises(module: Any) -> None:
    """Also for an event of something that never was."""
    decider, kinds = module.DECIDER, get_args(EVENTS[module]) or (EVENTS[module],)
    histories = [list(SAMPLES), *([one for _, one in random_history(s, 500)] for s in range(3))]
    for history in histories:
        own = [event for event in history if isinstance(event, kinds)]
        reduce(decider.evolve, own, decider.initial)
        for event in own:
            decider.evolve(decider.initial, event)
