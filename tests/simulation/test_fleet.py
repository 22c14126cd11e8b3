"""The simulated fleet: repeatable, loses no request, keeps within its memory, follows the product's
timings, and leaves a log whose decisions are the product's own."""

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.application import fleet_state, hold, ingest, reconcile, simulated_log
from controlplane.application.fleet_state import FleetState
from controlplane.application.replay import replay
from controlplane.dispatch.choose import RequestView, choose
from controlplane.domain import node, placement
from controlplane.domain.placement import Placement, PlacementDecided
from controlplane.simulation import control, exact, gateway, scenario
from controlplane.simulation.scenario import Arrivals, Failures, NodeGroup, Outage
from gpuagent.engine.engine import DEFAULT_ITL_SECONDS
from gpuagent.wire.messages import ReplicaSpec
from tests.simulation.fleets import CLASSES, Ran, ran, small

MANY = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
changes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "batching": st.sampled_from(("continuous", "static", "prefill-first")),
        "sharing": st.sampled_from(("shared", "one_model_per_gpu")),
        "arrivals": st.builds(
            lambda rate: Arrivals(per_second=rate, classes=CLASSES), st.floats(0.2, 8.0)
        ),
        "failures": st.builds(
            lambda mtbf, at, away: Failures((Outage("h-1", at, away),), mtbf, 0.05),
            st.sampled_from((0.0, 0.1, 1.0)), st.floats(0, 500), st.floats(1, 400),
        ),
    }
)  # fmt: skip


@MANY
@given(changes)
def test_the_same_seed_gives_the_same_run(given_changes: dict) -> None:
    one, again = ran(small(**given_changes)), ran(small(**given_changes))
    assert one.told() == again.told()
    assert one.fleet.control.events == again.fleet.control.events
    assert one.outcome.figures() == again.outcome.figures()


def test_another_seed_gives_another_run() -> None:
    assert ran(small(seed=1)).told() != ran(small(seed=2)).told()


@MANY
@given(changes)
def test_every_arrival_ends_exactly_once(given_changes: dict) -> None:
    """Finished with all its tokens, refused, or lost; and each token was computed no later than
    its end and no earlier than it came."""
    found = ran(small(**given_changes))
    assert sorted(job.number for job in found.jobs) == list(range(found.outcome.num_arrived))
    assert found.outcome.ends.total() == found.outcome.num_arrived
    for job in found.jobs:
        assert job.end in ("finished", "refused", "lost")
        assert (job.end == "finished") == (job.num_done == job.output and not job.code)
        assert job.ended_at >= job.at
        if job.end == "finished":
            assert job.at < job.first_at <= job.ended_at
        if job.end == "refused":
            assert job.num_done == 0 and job.code


@MANY
@given(changes)
def test_no_device_ever_holds_more_than_its_memory(given_changes: dict) -> None:
    """Of every decision, by the log: what is assigned to a device fits what is not reserved; with
    one model per GPU none holds two."""
    found = ran(small(**given_changes))
    state, capacity = Placement(), {}
    for _, event in found.fleet.control.events:
        if isinstance(event, node.NodeJoined):
            for device in event.devices:
                kept = control.RESERVED_BYTES[device.kind]
                capacity[event.node_id, device.index] = device.memory_bytes - kept
        if not isinstance(event, PlacementDecided):
            continue
        state = placement.evolve(state, event)
        held: Counter[tuple[str, int]] = Counter()
        for one in state.assignments.values():
            held[one.node_id, one.device_index] += one.memory_bytes
        assert all(held[place] <= capacity[place] for place in held)
        if given_changes["sharing"] == "one_model_per_gpu":
            assert len(held) == len(state.assignments)


@pytest.mark.parametrize("seed", range(4))
def test_more_nodes_never_serve_fewer(seed: int) -> None:
    """On these seeds, with the load, the loss and the models the same."""
    nodes = [
        (NodeGroup("h", "h100-80gb", 1, 1), NodeGroup("a", "a100-80gb", 1, 1)),
        (NodeGroup("h", "h100-80gb", 1, 1), NodeGroup("a", "a100-80gb", 2, 1)),
        (NodeGroup("h", "h100-80gb", 2, 2), NodeGroup("a", "a100-80gb", 2, 2)),
    ]
    reached = [ran(small(seed=seed, nodes=one)).outcome.availability for one in nodes]
    assert all(more >= fewer for fewer, more in pairwise(reached))
    assert reached[-1] > reached[0] or reached[0] == 1.0


# --- a loss, in time ----------------------------------------------------------------------------
def events_of(found: Ran, *kinds: type) -> list:
    return [event for _, event in found.fleet.control.events if isinstance(event, kinds)]


def test_a_lost_node_is_suspected_lost_replaced_and_back_at_the_products_times() -> None:
    found = ran(small())
    start = scenario.MONDAY
    suspected, lost = events_of(found, node.NodeSuspected), events_of(found, node.NodeLost)
    assert [one.at - start for one in suspected] == [206.0]
    assert [one.at - start for one in lost] == [215.0]
    moved = [
        one
        for one in events_of(found, PlacementDecided)
        if any(stop.code == "node_lost" for stop in one.stopped)
    ]
    assert len(moved) == 1 and 215.0 <= moved[0].at - start <= 217.0
    back = [one for one in events_of(found, node.NodeJoined) if one.boot_id == "boot-2"]
    assert [(one.node_id, one.at - start) for one in back] == [("h-1", 400.0)]


def test_what_ran_on_a_lost_node_goes_on_elsewhere_without_a_token_lost() -> None:
    found = ran(small(models=small().models[:1]))
    continued = [job for job in found.jobs if job.num_tries]
    assert continued and all(job.end == "finished" for job in continued)
    begun_before = [job for job in continued if 0 <= job.first_at < 200.0]
    assert begun_before and all(job.ended_at > 206.0 for job in begun_before)


def test_a_short_absence_places_nothing_anew() -> None:
    """Back before it is lost: its own replicas load there again."""
    found = ran(small(failures=Failures((Outage("h-1", 200.0, 10.0),))))
    assert events_of(found, node.NodeLost) == []
    stops = [stop.code for one in events_of(found, PlacementDecided) for stop in one.stopped]
    assert "node_lost" not in stops
    assert found.outcome.ends["finished"] > 0.9 * found.outcome.ends.total() - 300


def test_two_of_three_silent_nodes_are_not_declared_lost() -> None:
    """More than a fifth, and more than one: the controller takes it for its own broken line."""
    both = (Outage("h-1", 200.0, 100.0), Outage("a-1", 200.0, 100.0))
    found = ran(small(failures=Failures(both)))
    assert len(events_of(found, node.NodeSuspected)) == 2
    assert events_of(found, node.NodeLost) == []


def test_a_model_scaled_to_zero_is_loaded_by_its_request() -> None:
    rare = replace(small().models[3], share=100.0)
    found = ran(small(models=(*small().models[:3], rare), failures=Failures()))
    first = min((job for job in found.jobs if job.was_held), key=lambda job: job.at)
    assert first.end == "finished" and first.first_at - first.at > 4.0
    assert found.outcome.num_cold_starts == 1


# --- the log is the product's -------------------------------------------------------------------
def test_every_decision_of_a_simulation_replays_bit_for_bit() -> None:
    """The log in an event store, folded by the application; the planner decides again."""
    found = ran(small())
    clock = ManualClock()
    store = MemoryEventStore(clock)
    simulated_log.write(store, clock, found.fleet.control.events)
    state, num_decisions = FleetState(), 0
    for recorded in store.read_all(0, 100_000):
        if isinstance(recorded.event, PlacementDecided):
            assert recorded.event.planned_from == recorded.position - 1
            assert replay(state, recorded).differences == ()
            num_decisions += 1
        state.apply(recorded)
    assert num_decisions == found.fleet.control.placement.generation > 2
    assert state.placement == found.fleet.control.placement
    assert state.nodes == found.fleet.control.nodes


def test_figures_are_those_of_the_product() -> None:
    timings = ingest.DEFAULT_TIMINGS
    assert timings == ingest.Timings(control.SUSPECT_S, control.LOST_S, control.FREEZE_SHARE)
    assert control.RESERVED_BYTES == reconcile.RESERVED_BYTES
    assert dict(hold.HOLD_S) == scenario.HOLD_S
    assert (gateway.MAX_HELD, gateway.UNPLACED_S) == (hold.MAX_HELD, hold.UNPLACED_S)
    for name in ("LOAD_FIRST_S", "LOAD_BYTES_PER_S", "DECIDE_S"):
        assert getattr(gateway, name) == getattr(fleet_state, name)
    assert exact.TARGET_ITL_S == DEFAULT_ITL_SECONDS
    told = {one.name: one.default for one in msgspec.structs.fields(ReplicaSpec)}
    assert told["max_batch_tokens"] == exact.MAX_BATCH_TOKENS


def test_where_one_replica_is_ready_choose_would_have_chosen_it() -> None:
    found = ran(small(failures=Failures()))
    machines = found.fleet.machines
    alone = [one for one in machines.ready if len(one) == 1]
    assert alone
    for number, ready in enumerate(machines.ready):
        if len(ready) == 1:
            views = machines.views(number, lambda _: "ready", 700.0)
            assert choose(views, RequestView(100, 100)).replica_id in ready


def test_a_loss_in_exact_mode_ends_every_request_once_too() -> None:
    found = ran(small(mode="exact", seconds=240.0, arrivals=Arrivals(1.0, classes=CLASSES)))
    assert sorted(job.number for job in found.jobs) == list(range(found.outcome.num_arrived))
    assert any(job.num_tries for job in found.jobs)
