"""What people read of the fleet, told by the events that make it so."""

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.adapters.clock import ManualClock
from controlplane.adapters.memory import MemoryEventStore
from controlplane.application.ports import Append, EventMeta
from controlplane.domain import model, node, placement, route, tenant
from controlplane.domain.budget import Budget
from controlplane.domain.decider import Event
from controlplane.domain.version_spec import VersionSpec
from controlplane.projections.audit import AuditEntry
from controlplane.projections.base import Row, key_of
from controlplane.projections.catalog import Alias, Model, Version
from controlplane.projections.decisions import Decision
from controlplane.projections.fleet import LoadFailure, Node, Replica
from controlplane.projections.fold import ALL, fold_rows, state_hash
from controlplane.projections.memory import MemoryRows
from controlplane.projections.routes import Route
from controlplane.projections.standing import Unplaced
from controlplane.projections.tenants import ApiKey, Tenant
from tests.domain import samples as s
from tests.projections.history import every_sample, random_history

META = EventMeta("user:ada", "req-1", "", "10.0.0.1", "because")
PLACED = placement.PlacementDecided(
    "d1", 3, (placement.Started(s.ASSIGNMENT, "wanted", (), ()),), (), (), 4.0
)
STOPPED = placement.PlacementDecided(
    "d2", 9, (), (placement.Stopped(s.ASSIGNMENT, "surplus", "too many"),), (), 9.0
)
FLEET = (
    ("model-smollm2", model.ModelRegistered("smollm2", 1.0)),
    ("model-smollm2", model.ModelVersionAdded("smollm2", s.SPEC, 2.0)),
    ("node-n1", node.NodeJoined(s.NODE, "boot-1", "zone-a", s.DEVICES, 3.0)),
)
LOADING = node.ReplicaStateChanged(s.NODE, s.R1, s.V1, "loading", 5.0)
READY = node.ReplicaBecameReady(s.NODE, s.R1, s.V1, 0, 10, 20, 40, 1.5, "ab", 6.0)
FAILED = node.ReplicaFailed(s.NODE, s.R1, s.V1, "out_of_memory", "1 GiB free", 6.0)
GONE = node.ReplicaStopped(s.NODE, s.R1, s.V1, 10.0)


def rows_after(*history: tuple[str, Event]) -> MemoryRows:
    """Through a store, so that positions and versions are real ones."""
    store = MemoryEventStore(ManualClock())
    for stream, event in history:
        store.append(Append(stream, None, [event], META))
    return fold_rows(store.read_all(0, 10_000), ALL)


def fleet_after(*events: Event) -> MemoryRows:
    history = [
        ("placement" if isinstance(e, placement.PlacementDecided) else "node-n1", e) for e in events
    ]
    return rows_after(*FLEET, *history)


def replica_after(*events: Event) -> Replica | None:
    return fleet_after(*events).get(Replica, s.R1)


def standing_after(*events: Event) -> tuple[str, int, int, str]:
    row = fleet_after(*events).get(Version, s.V1)
    assert row is not None
    return row.status, row.ready_replicas, row.desired_replicas, row.reason


def test_a_tenant_is_shown_as_it_is_now() -> None:
    """With the version of its stream, the count of its live keys and its budget."""
    stream = "tenant-acme"
    rows = rows_after(
        (stream, tenant.TenantCreated(s.ACME, "acme", "free", 1.0)),
        (stream, tenant.ApiKeyIssued(s.ACME, s.KEY, "k", "wxyz", ("inference",), None, 2.0)),
        (stream, tenant.TenantSuspended(s.ACME, "unpaid", 3.0)),
        (stream, tenant.TenantBudgetSet(s.ACME, "ci", "key", s.KEY, "tokens", 5, "day", 4.0)),
        (stream, tenant.TenantBudgetReset(s.ACME, "ci", 3, 5.0)),
        (stream, tenant.TenantBudgetSet(s.ACME, "ci", "key", s.KEY, "tokens", 9, "day", 6.0)),
    )
    budget = Budget("ci", "key", s.KEY, "tokens", 9, "day", 3, 5.0)
    shown = Tenant("acme", "acme", "free", 1.0, 6, True, "unpaid", (budget,), 1)
    assert rows.all(Tenant) == (shown,)
    assert rows.find(ApiKey, "tenant_id", "acme")[0].revoked is False


def test_a_deleted_tenant_is_gone_with_its_keys() -> None:
    stream = "tenant-acme"
    rows = rows_after(
        (stream, tenant.TenantCreated(s.ACME, "acme", "free", 1.0)),
        (stream, tenant.ApiKeyIssued(s.ACME, s.KEY, "k", "wxyz", ("inference",), None, 2.0)),
        (stream, tenant.ApiKeyRevoked(s.ACME, s.KEY, 3.0)),
        (stream, tenant.TenantDeleted(s.ACME, 4.0)),
    )
    assert rows.all(Tenant) == rows.all(ApiKey) == ()


def test_a_model_shows_its_default_and_aliases() -> None:
    second = ("model-smollm2", model.ModelVersionAdded("smollm2", _v2(), 3.0))
    chosen = ("model-smollm2", model.ModelDefaultVersionSet("smollm2", "v2", 4.0))
    retired = ("model-smollm2", model.ModelVersionRetired("smollm2", "v1", 5.0))
    alias = ("model-smollm2", model.ModelAliasAdded("smollm2", "small", 6.0))
    assert _model(*FLEET, second).default_version == "v1"
    assert _model(*FLEET, second, chosen).default_version == "v2"
    assert _model(*FLEET, second, retired).default_version == "v2"
    shown = _model(*FLEET, alias)
    assert (shown.aliases, shown.version) == (("small",), 3)
    assert rows_after(*FLEET, alias).get(Alias, "small") == Alias("small", "smollm2", 6.0)


def _model(*history: tuple[str, Event]) -> Model:
    return rows_after(*history).all(Model)[0]


def _v2() -> VersionSpec:
    return VersionSpec(version="v2", source="hf://a/b", gpu_memory=1)


def test_a_version_row_gives_its_specification_back() -> None:
    row = rows_after(*FLEET).get(Version, s.V1)
    assert row is not None and row.spec == s.SPEC


def test_an_alias_taken_over_by_another_model_stays_with_it() -> None:
    """Removing it from the first then leaves the second's."""
    rows = rows_after(
        ("model-a", model.ModelRegistered("a", 1.0)),
        ("model-b", model.ModelRegistered("b", 1.0)),
        ("model-a", model.ModelAliasAdded("a", "x", 2.0)),
        ("model-b", model.ModelAliasAdded("b", "x", 3.0)),
        ("model-a", model.ModelAliasRemoved("a", "x", 4.0)),
    )
    assert rows.all(Alias) == (Alias("x", "b", 3.0),)


def test_a_route_shows_when_it_was_changed() -> None:
    rows = rows_after(
        ("route-chat", route.RouteCreated("chat", s.ARMS, True, 1.0)),
        ("route-chat", route.RouteArmsChanged("chat", s.ARMS[:1], False, 2.0)),
    )
    assert rows.all(Route) == (Route("chat", s.ARMS[:1], False, 1.0, 2.0, 2),)


def test_desired_acknowledged_and_observed_are_three_facts() -> None:
    """Each event moves one of them; ``state`` sums up, ``since`` is when it became so."""
    acked = node.NodeAcknowledged(s.NODE, 1, 4.5)
    steps = [
        ((PLACED,), (True, False, None, "assigned", 4.0)),
        ((PLACED, acked), (True, True, None, "accepted", 4.5)),
        ((PLACED, acked, LOADING), (True, True, "loading", "loading", 5.0)),
        ((PLACED, acked, LOADING, READY), (True, True, "ready", "ready", 6.0)),
        ((PLACED, acked, READY, STOPPED), (False, False, "ready", "stopping", 9.0)),
    ]
    for events, expected in steps:
        row = replica_after(*events)
        assert row is not None
        assert (row.desired, row.acked, row.observed, row.state, row.since) == expected
    assert replica_after(PLACED, acked, READY, STOPPED, GONE) is None


def test_a_stopped_replica_that_never_ran_is_gone_at_once() -> None:
    assert replica_after(PLACED, STOPPED) is None
    assert replica_after(PLACED, FAILED, STOPPED) is None


def test_a_replica_that_no_plan_wants_is_shown_until_it_stops() -> None:
    """As after restoring an older log: it is visible, and visibly unwanted."""
    row = replica_after(LOADING)
    assert row is not None and (row.desired, row.state) == (False, "stopping")
    assert replica_after(LOADING, GONE) is None


def test_a_lost_node_is_not_believed_any_more() -> None:
    """Its replicas are lost until it is heard again, which is then from the beginning."""
    lost = node.NodeLost(s.NODE, 15.0, 7.0)
    row = replica_after(PLACED, READY, lost)
    assert row is not None and (row.observed, row.state) == (None, "lost")
    assert standing_after(PLACED, READY, lost)[:2] == ("loading", 0)
    back = replica_after(PLACED, READY, lost, node.NodeRecovered(s.NODE, "boot-1", 8.0))
    assert back is not None and back.state == "assigned"


def test_a_removed_node_leaves_nothing_that_counts() -> None:
    """Also one that was only suspected, whose replicas were ready by its last word."""
    suspected = node.NodeSuspected(s.NODE, 6.0, 7.0)
    removed = node.NodeRemoved(s.NODE, 8.0)
    assert standing_after(PLACED, READY, suspected)[1] == 1
    assert standing_after(PLACED, READY, suspected, removed)[:2] == ("loading", 0)


def test_a_restarted_agent_starts_from_nothing() -> None:
    again = node.NodeJoined(s.NODE, "boot-2", "zone-a", s.DEVICES, 7.0)
    row = replica_after(PLACED, READY, again)
    assert row is not None and (row.observed, row.state) == (None, "assigned")


def test_a_node_shows_what_it_should_have_accepted() -> None:
    rows = fleet_after(PLACED, node.NodeAcknowledged(s.NODE, 0, 5.0))
    shown = rows.get(Node, "n1")
    assert shown is not None
    assert (shown.desired_generation, shown.acked_generation, shown.last_seen) == (1, 0, 5.0)


def test_how_a_version_stands() -> None:
    """Ready if anything answers, else why not."""
    gap = placement.Unplaced(s.V1, 2, "no_memory", "fits nowhere", ())
    unplaced = placement.PlacementDecided("d3", 3, (), (), (gap,), 4.0)
    assert standing_after()[:3] == ("unplaced", 0, 0)
    assert standing_after(unplaced) == ("unplaced", 0, 2, "fits nowhere")
    assert standing_after(PLACED) == ("loading", 0, 1, "")
    assert standing_after(PLACED, FAILED) == ("failed", 0, 1, "out_of_memory: 1 GiB free")
    assert standing_after(PLACED, FAILED, READY) == ("ready", 1, 1, "")
    assert standing_after(PLACED, unplaced, READY)[:3] == ("ready", 1, 3)
    closed = placement.PlacementDecided("d4", 4, (), (), (), 5.0)
    assert standing_after(PLACED, unplaced, closed)[2] == 1
    assert fleet_after(unplaced, closed).all(Unplaced) == ()


def test_a_drain_that_finds_no_room_wants_no_replica_more() -> None:
    """What is missing is the successor of the one that stays; the version says why it stays."""
    gap = placement.Unplaced(s.V1, 1, "insufficient_memory", "1 replica is too large.", ())
    planned = placement.PlacementDecided("d3", 3, (), (), (gap,), 8.0)
    drained = node.NodeDrainStarted(s.NODE, "new driver", 7.0)
    assert standing_after(PLACED, READY, drained) == ("ready", 1, 1, "")
    waits = f"The replica on {s.NODE} has no other place, so the drain waits. {gap.reason}"
    assert standing_after(PLACED, READY, drained, planned) == ("ready", 1, 1, waits)
    more = replace(planned, unplaced=(replace(gap, num_missing=2),))
    assert standing_after(PLACED, READY, drained, more)[:3] == ("ready", 1, 2)
    ended = node.NodeDrainEnded(s.NODE, 9.0)
    closed = placement.PlacementDecided("d4", 4, (), (), (), 9.5)
    assert standing_after(PLACED, READY, drained, planned, ended, closed) == ("ready", 1, 1, "")


def test_a_version_kept_off_by_failures_shows_what_its_node_said() -> None:
    """Not only the code: the planner knows no more, the row of the failure does. And when it may be
    placed again, which is the planner's to say."""
    waits = placement.Rejection(s.NODE, 0, "backoff", "failed 1 times there")
    gap = placement.Unplaced(s.V1, 1, "backoff", "1 replica waits.", (waits,))
    planned = placement.PlacementDecided(
        "d3", 3, (), (placement.Stopped(s.ASSIGNMENT, "failed", ""),), (gap,), 7.0
    )
    shown = standing_after(PLACED, FAILED, planned)
    assert shown[3] == f"1 replica waits. Node {s.NODE} says: 1 GiB free"
    row = fleet_after(PLACED, replace(FAILED, retry_s=25.0), planned).get(Version, s.V1)
    assert row is not None and row.retry_at == FAILED.at + 10.0, "as the planner has it"
    full = replace(gap, rejections=())
    assert standing_after(PLACED, FAILED, replace(planned, unplaced=(full,)))[3] == full.reason
    elsewhere = fleet_after(PLACED, FAILED, replace(planned, unplaced=(full,))).get(Version, s.V1)
    assert elsewhere is not None and elsewhere.retry_at is None


def test_a_retired_version_is_retired_whatever_runs() -> None:
    retired = ("model-smollm2", model.ModelVersionRetired("smollm2", "v1", 9.0))
    rows = rows_after(*FLEET, ("placement", PLACED), ("node-n1", READY), retired)
    row = rows.get(Version, s.V1)
    assert row is not None and (row.status, row.ready_replicas) == ("retired", 1)


def test_failures_are_counted_per_node_until_the_version_is_ready() -> None:
    failed = fleet_after(PLACED, FAILED, FAILED).all(LoadFailure)
    assert [(row.node_id, row.version_id, row.num_failures) for row in failed] == [
        ("n1", "smollm2@v1", 2)
    ]
    assert fleet_after(PLACED, FAILED, READY).all(LoadFailure) == ()


WAITING = node.ReplicaStateChanged(
    s.NODE, s.R1, s.V1, "pending", 6.0, "not_resident", "needs 2 GiB"
)
STUCK = node.ReplicaOverdue(
    s.NODE, s.R1, s.V1, "pending", "not_resident", "needs 2 GiB, 1 is free", 60.0, 66.0
)


def test_a_stuck_replica_is_shown_so_with_its_reason_until_it_moves() -> None:
    """Since the first time; and what it waits for, before it is stuck."""
    waiting = replica_after(PLACED, WAITING)
    assert waiting is not None and (waiting.waiting, waiting.stuck_since) == ("needs 2 GiB", None)
    again = replace(STUCK, at=126.0, waited_s=120.0, detail="needs 2 GiB, 0 are free")
    stuck = replica_after(PLACED, WAITING, STUCK, again)
    assert stuck is not None and (stuck.state, stuck.stuck_since) == ("pending", 6.0)
    assert (stuck.stuck_code, stuck.stuck_reason) == ("not_resident", "needs 2 GiB, 0 are free")
    for later in (LOADING, READY, FAILED, STOPPED):
        row = replica_after(PLACED, WAITING, STUCK, later)
        assert row is None or (row.stuck_since, row.stuck_reason, row.waiting) == (None, "", "")


def test_a_version_says_what_is_stuck_of_it_and_when_it_is_tried_again() -> None:
    def row_after(*events: Event) -> Version:
        row = fleet_after(*events).get(Version, s.V1)
        assert row is not None
        return row

    stuck = row_after(PLACED, WAITING, STUCK)
    assert (stuck.status, stuck.stuck_replicas) == ("loading", 1)
    assert stuck.reason == "Stuck on n1: needs 2 GiB, 1 is free"
    failed = row_after(PLACED, replace(FAILED, retry_s=0.0))
    assert (failed.status, failed.retry_at) == ("failed", FAILED.at + 10.0)
    assert row_after(PLACED, replace(FAILED, retry_s=25.0)).retry_at == FAILED.at + 25.0
    again = row_after(PLACED, FAILED, LOADING)
    assert (again.status, again.retry_at) == ("loading", None)
    assert again.reason == "Tried again; on n1 out_of_memory: 1 GiB free"
    fine = row_after(PLACED, FAILED, STUCK, READY)
    assert (fine.reason, fine.stuck_replicas, fine.retry_at) == ("", 0, None)


def test_a_node_that_does_not_accept_is_stuck_until_it_does() -> None:
    def node_after(*events: Event) -> Node:
        row = fleet_after(PLACED, *events).get(Node, "n1")
        assert row is not None
        return row

    late = node.NodeOverdue(s.NODE, 2, 1, "refused", "it accepted (5, 40)", 31.0, 40.0)
    shown = node_after(late, replace(late, at=60.0, code="silent"))
    assert (shown.stuck_since, shown.stuck_code) == (9.0, "silent")
    for later in (
        node.NodeAcknowledged(s.NODE, 1, 50.0),
        node.NodeLost(s.NODE, 15.0, 50.0),
        node.NodeJoined(s.NODE, "boot-9", "zone-a", s.DEVICES, 50.0),
    ):
        assert node_after(late, later).stuck_since is None
    same = node.NodeJoined(s.NODE, "boot-1", "zone-b", s.DEVICES, 50.0)
    assert node_after(late, same).stuck_since == 9.0


def test_a_ready_replica_says_why_it_serves_less_well() -> None:
    """What its node warned of, and only while it is so."""
    warned = replace(READY, warning="bf16 is slow here")
    (row,) = fleet_after(PLACED, FAILED, warned).all(Replica)
    assert (row.state, row.reason) == ("ready", "bf16 is slow here")
    (row,) = fleet_after(PLACED, warned, READY).all(Replica)
    assert row.reason == ""


def test_the_audit_says_who_did_what_from_where_refusals_included() -> None:
    rows = rows_after(FLEET[0], ("refusals", s.REFUSED), FLEET[2])
    done, refused = rows.all(AuditEntry)
    assert (done.actor, done.address, done.reason) == ("user:ada", "10.0.0.1", "because")
    assert (done.action, done.target, done.outcome) == ("ModelRegistered", "model-smollm2", "done")
    assert (refused.action, refused.outcome, refused.code) == (
        "AddAlias",
        "refused",
        "model_not_found",
    )
    assert (done.before, done.after["model smollm2"]["name"]) == ({}, "smollm2")
    assert refused.asked == {"alias": "small"}


def test_an_audit_entry_is_made_before_the_rows_change() -> None:
    """And leaves them as they are: the rows are those of the other projections alone."""
    history = [*FLEET, ("placement", PLACED), ("node-n1", READY)]
    drained = ("node-n1", s.node.NodeDrainStarted(s.NODE, "kernel", 9.0))
    rows = rows_after(*history, drained)
    entry = rows.all(AuditEntry)[-1]
    assert entry.before == {"node n1": {"drain_reason": "", "draining": False}}
    assert entry.after == {"node n1": {"drain_reason": "kernel", "draining": True}}


def test_a_decision_keeps_its_plan() -> None:
    (shown,) = fleet_after(PLACED).all(Decision)
    assert (shown.decision_id, shown.generation, shown.planned_from) == ("d1", 1, 3)
    assert shown.started == PLACED.started


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_no_history_makes_a_projection_raise(seed: int) -> None:
    """However events contradict each other, counts agree with the rows that they count."""
    rows = rows_after(*every_sample(), *random_history(seed, 150))
    for version in rows.all(Version):
        mine = [one for one in rows.all(Replica) if one.version_id == version.version_id]
        ready = [one for one in mine if one.desired and one.observed == "ready"]
        assert version.ready_replicas == len(ready)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_an_index_finds_what_a_scan_finds(seed: int) -> None:
    rows = rows_after(*random_history(seed, 200))
    for name in ("n1", "n2", "n3"):
        scanned = [row for row in rows.all(Replica) if row.node_id == name]
        assert sorted(rows.find(Replica, "node_id", name), key=key_of) == sorted(
            scanned, key=key_of
        )


class Lent(Row, frozen=True):
    thing: str
    to: str | None

    indexed: ClassVar = ("to",)


def test_an_index_finds_what_has_no_value() -> None:
    rows = MemoryRows()
    rows.put(Lent("book", None))
    assert rows.find(Lent, "to", None) == (Lent("book", None),)
    rows.put(Lent("book", "ann"))
    assert rows.find(Lent, "to", None) == () and rows.find(Lent, "to", "ann")


def test_the_state_hash_sees_every_field() -> None:
    rows = rows_after(*random_history(2, 200))
    again = rows_after(*random_history(2, 200))
    assert state_hash(rows) == state_hash(again)
    (row, *_) = again.all(Node)
    again.put(Node(**{**{f: getattr(row, f) for f in row.__struct_fields__}, "zone": "other"}))
    assert state_hash(rows) != state_hash(again)


def test_a_search_by_what_is_not_indexed_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        rows_after().find(Node, "zone", "zone-a")
