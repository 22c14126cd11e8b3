"""What the chaos run would call an old generation that was served: each is found."""

from typing import Any

import pytest

from tests.crash.slots import LAG_S, Fleet, misdirected

Json = dict[str, Any]


def log(*events: tuple[str, float, Json]) -> Fleet:
    fleet = Fleet({"a@v1": 1})
    for position, (kind, at, data) in enumerate(events, 1):
        fleet.apply({"type": kind, "position": position, "data": {"at": at, **data}})
    return fleet


def joined(node_id: str, at: float, boot: str = "b") -> tuple[str, float, Json]:
    return "NodeJoined", at, {"node_id": node_id, "boot_id": boot}


def ready(node_id: str, replica_id: str, at: float) -> tuple[str, float, Json]:
    return "ReplicaBecameReady", at, {"node_id": node_id, "replica_id": replica_id}


def lost(node_id: str, at: float) -> tuple[str, float, Json]:
    return "NodeLost", at, {"node_id": node_id}


def decided(
    at: float, start: Json | None = None, stop: str = "", planned_from: int = 100
) -> tuple[str, float, Json]:
    """``start``: replica -> node."""
    placed = [
        {"assignment": {"replica_id": name, "version_id": "a@v1", "node_id": node}}
        for name, node in (start or {}).items()
    ]
    stopped = [{"assignment": {"replica_id": stop}}] if stop else []
    return "PlacementDecided", at, dict(started=placed, stopped=stopped, planned_from=planned_from)


BEGUN = (joined("n1", 0), joined("n2", 0), decided(1, {"r1": "n1"}), ready("n1", "r1", 2))
MOVED = (*BEGUN, lost("n1", 20), decided(20.1, {"r2": "n2"}, "r1"), ready("n2", "r2", 21))


def test_a_lost_node_and_its_return_are_right() -> None:
    """Also when the old replica is still reported after the line is whole again."""
    recovered = ("NodeRecovered", 30, {"node_id": "n1"})
    assert log(*MOVED, recovered, ready("n1", "r1", 30.1), lost("n2", 90)).problems == []


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ((*MOVED, decided(22, {"r1": "n1"})), "r1 was started again"),
        ((*BEGUN, lost("n1", 20), decided(20.1, {"r2": "n2"})), "r1 stays on a lost node"),
        (
            (*BEGUN, decided(3, {"r2": "n2"}), ready("n2", "r2", 4), joined("n3", 9)),
            "a@v1: one too many for 5.0 s at 9",
        ),
    ],
)
def test_what_no_log_may_hold_is_found(events: tuple[Any, ...], problem: str) -> None:
    assert problem in log(*events).problems


def test_a_decision_made_before_the_loss_was_known_is_right() -> None:
    early = decided(20.1, {"r2": "n2"}, planned_from=4)
    assert log(*BEGUN, lost("n1", 20), early, decided(20.2, stop="r1")).problems == []


def attempt(number: int, replica: str, node: str, began: float, seconds: float = 1.0) -> Json:
    times = {"started_at": began, "duration_ms": seconds * 1000}
    return {"request_id": "q", "choice": 0, "attempt": number, "replica_id": replica,
            "node_id": node, **times}  # fmt: skip


@pytest.mark.parametrize(
    ("attempts", "problem"),
    [
        ([attempt(1, "r1", "n1", 19), attempt(2, "r2", "n2", 21)], ""),
        ([attempt(1, "r1", "n1", 20.2 + LAG_S)], "3.1 s after it was stopped"),
        ([attempt(1, "r2", "n2", 19)], "before it was decided"),
        ([attempt(1, "r2", "n1", 21)], "not placed on n1"),
        ([attempt(1, "r3", "n1", 21)], "not placed on n1"),
        ([attempt(1, "r1", "n1", 19, 3), attempt(2, "r2", "n2", 21)], "two attempts at once"),
    ],
)
def test_attempts_on_what_was_not_placed_are_found(attempts: list[Json], problem: str) -> None:
    found = list(misdirected(attempts, log(*MOVED).generations))
    assert [problem in one for one in found] == [True] * bool(problem)
