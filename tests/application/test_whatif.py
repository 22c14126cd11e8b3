"""What-if reads the log, at any position, and appends nothing."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane import bootstrap
from controlplane.application.ports import EventStore
from controlplane.application.whatif import sentences
from controlplane.simulation.whatif import Change, Load
from tests.application.test_repack import placed, step, with_holes


@pytest.fixture
def store(database: Path) -> EventStore:
    return bootstrap.event_store()


def test_a_lost_node_is_told_from_the_log_and_nothing_is_written(store: EventStore) -> None:
    life = with_holes(store)
    step(life)
    bootstrap.projector().catch_up_all()
    before = store.head()
    made = bootstrap.what_if(Change(lose=("k1",)))
    assert made.position == before.position and store.head() == before
    assert placed(life) == {"a@v1": "k1", "b@v1": "k2"}
    assert [(one.version_id, one.node_id) for one in made.outcome.left] == [("a@v1", "k1")]
    assert [(one.version_id, one.node_id) for one in made.outcome.joined] == [("a@v1", "k2")]
    assert "a@v1 starts on k2/0." in sentences(made)


def test_the_fork_may_be_in_the_past(store: EventStore) -> None:
    """Before anything joined there is no such node to lose."""
    step(with_holes(store))
    with pytest.raises(CommandError, match="no node 'k1'"):
        call_command("whatif", "--lose-node", "k1", "--at", "0")
    with pytest.raises(CommandError, match="The log ends at"):
        call_command("whatif", "--lose-node", "k1", "--at", "1000000")


def test_one_replica_is_one(store: EventStore) -> None:
    step(with_holes(store))
    made = bootstrap.what_if(Change(replicas=(("a@v1", 2),)))
    told = [Load("a@v1", 1, 2, 0.5), Load("a@v1", 2, 1, 2.0)]
    for load, begins in zip(told, ("1 replica, then 2;", "2 replicas, then 1;"), strict=True):
        outcome = replace(made.outcome, loads=(load,))
        assert any(begins in one for one in sentences(replace(made, outcome=outcome)))


def test_the_command(store: EventStore) -> None:
    step(with_holes(store))
    call_command("whatif", "--add-node", "k9=k1", stdout=(out := StringIO()))
    assert "1 missing of c@v1 find room." in out.getvalue()
    call_command("whatif", stdout=(out := StringIO()))
    assert "Nothing would change." in out.getvalue()
    with pytest.raises(CommandError, match="NAME=VALUE"):
        call_command("whatif", "--add-node", "k9")
