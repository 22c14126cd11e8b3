"""How long what is kept, and what was removed for it."""

import pytest

from controlplane.domain import retention
from controlplane.domain.retention import (
    NoteRemoved,
    Retention,
    RetentionSet,
    SegmentRemoved,
    SetRetention,
    days_of,
)
from tests.domain.scenario import Scenario


def given(*events: retention.RetentionEvent) -> Scenario:
    return Scenario(retention.DECIDER, events)


def test_a_kind_is_kept_as_long_as_was_said_last() -> None:
    assert days_of("text", Retention()) == 30
    given().when(SetRetention("text", 7, 1.0)).then(RetentionSet("text", 30, 7, 1.0))
    for_ever = RetentionSet("text", 30, None, 1.0)
    assert days_of("text", retention.evolve(Retention(), for_ever)) is None
    given(for_ever).when(SetRetention("text", 7, 2.0)).then(RetentionSet("text", None, 7, 2.0))


def test_what_is_so_already_changes_nothing() -> None:
    given().when(SetRetention("requests", 396, 1.0)).then_nothing()
    given(RetentionSet("requests", 396, 9, 1.0)).when(
        SetRetention("requests", 9, 2.0)
    ).then_nothing()


@pytest.mark.parametrize("days", [0, -1, 36_501])
def test_days_are_at_least_one_and_at_most_a_century(days: int) -> None:
    given().when(SetRetention("text", days, 1.0)).then_refused("invalid_days")


def test_events_and_usage_have_no_retention() -> None:
    given().when(SetRetention("events", 30, 1.0)).then_refused("retention_not_found")


def test_a_segment_is_noted_as_removed_once() -> None:
    note = NoteRemoved("requests", 1, 1000, "requests-from-1", 1.0)
    gone = SegmentRemoved("requests", 1, 1000, "requests-from-1", 1.0)
    given().when(note).then(gone)
    given(gone).when(note).then_nothing()
