"""Where replicas are placed and where they are now, both with since when, over REST."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane import bootstrap
from controlplane.application.fleet import NodeLoad, ReplicaLoad
from controlplane.application.ports import Append, EventMeta
from controlplane.domain import node, placement
from controlplane.domain.model import ModelRegistered, ModelVersionAdded
from controlplane.domain.version_spec import VersionSpec
from tests.domain.samples import DEVICES
from tests.rest.conftest import Api

NAMES = ("a", "b")
SPEC = VersionSpec(version="v1", source="simulated://m", gpu_memory=1000, residency="swappable")


def assignment(name: str, tier: str) -> placement.Assignment:
    return placement.Assignment(
        f"{name}.v1.g1.0",
        f"{name}@v1",
        "n1",
        0,
        1000,
        tier=tier,  # type: ignore[arg-type]
    )


A, B = assignment("a", "resident"), assignment("b", "warm")
STARTED = placement.PlacementDecided(
    "d1", 3, tuple(placement.Started(one, "It fits.", (), ()) for one in (A, B)), (), (), 100.0
)
RETIERED = placement.PlacementDecided(
    "d2", 4, (), (), (), 200.0, placement.PlanInputs(planner=6),
    (
        placement.Retiered(
            replace(A, tier="warm"), "resident", "less_asked", "b asks more.", 0.5, (B.replica_id,)
        ),
        placement.Retiered(
            replace(B, tier="resident"), "warm", "more_asked", "b asks more.", 8.0, (A.replica_id,)
        ),
    ),
)  # fmt: skip


def append(stream: str, *events: Any) -> int:
    added = Append(stream, None, events, EventMeta("user:ann"))
    bootstrap.event_store().append(added)
    return bootstrap.event_store().head().position


@pytest.fixture
def head(admin: Api) -> int:
    """Two replicas share a device; the second decision changed their tiers."""
    bootstrap.heard_loads.cache_clear()
    append("node-n1", node.NodeJoined("n1", "b1", "z", DEVICES, 1.0))  # type: ignore[arg-type]
    for name in NAMES:
        added = ModelVersionAdded(name, SPEC, 1.0)
        append(f"model-{name}", ModelRegistered(name, 1.0), added)
    append("placement", STARTED)
    return append("placement", RETIERED)


def said(seq: int, **tiers: tuple[str, float]) -> None:
    """The node's telemetry comes in, as the process's hub takes it."""
    replicas = tuple(
        ReplicaLoad(
            f"{name}.v1.g1.0", f"{name}@v1", 0, "ready", 0, 0, 0, 0, 16, 0.0, 0.0, 0, 0, 0, 0, 0.0,
            tier=tier, tier_since=since,
        )
        for name, (tier, since) in tiers.items()
    )  # fmt: skip
    load = NodeLoad("n1", "b1", seq, 0.0, 1, 1, False, (), replicas)
    assert bootstrap.heard_loads().record(load, bootstrap.clock().monotonic())


def tiers_of(body: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    names = ("tier", "tier_since", "live_tier", "live_tier_since")
    return {one["version_id"]: tuple(one[name] for name in names) for one in body}


def test_placed_and_live_tier_are_shown_with_since_when(admin: Api, head: int) -> None:
    """On placements and on nodes; b was promoted, and has not been asked for yet."""
    said(1, a=("resident", 150.5), b=("host", 120.25))
    expected = {
        "a@v1": ("warm", 200.0, "resident", 150.5),
        "b@v1": ("resident", 200.0, "host", 120.25),
    }
    listed = admin.get(f"placements/?min_position={head}").json()["results"]
    assert tiers_of(listed) == expected
    assert {one["tier_reason"] for one in listed} == {"b asks more."}
    assert tiers_of(admin.get("nodes/n1/").json()["replicas"]) == expected
    assert tiers_of(admin.get("nodes/").json()["results"][0]["replicas"]) == expected
    said(2, a=("host", 201.0), b=("resident", 201.5))
    now = tiers_of(admin.get("placements/").json()["results"])
    assert now["b@v1"] == ("resident", 200.0, "resident", 201.5)


def test_a_model_shows_how_many_replicas_are_in_which_tier(admin: Api, head: int) -> None:
    said(1, a=("resident", 150.5), b=("host", 120.25))
    (version,) = admin.get(f"models/b/?min_position={head}").json()["versions"]
    assert (version["placed_tiers"], version["live_tiers"]) == ({"resident": 1}, {"host": 1})
    listed = {one["name"]: one for one in admin.get("models/").json()["results"]}
    assert listed["a"]["versions"][0]["placed_tiers"] == {"warm": 1}
    assert admin.get("models/a/versions/v1/").json()["live_tiers"] == {"resident": 1}


def test_what_is_not_heard_is_not_guessed(
    admin: Api, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was said yet; the node has no tiers; it was last heard too long ago."""
    body = admin.get(f"placements/?min_position={head}").json()["results"]
    assert tiers_of(body)["a@v1"] == ("warm", 200.0, None, None)
    said(1, a=("", 0.0), b=("host", 0.0))
    found = tiers_of(admin.get("placements/").json()["results"])
    assert (found["a@v1"][2:], found["b@v1"][2:]) == ((None, None), ("host", None))
    said(2, a=("host", 1.0), b=("host", 1.0))
    loads = bootstrap.heard_loads()
    load = loads.latest("n1")
    assert load is not None
    loads.record(replace(load, seq=3), bootstrap.clock().monotonic() - 6.5)
    assert tiers_of(admin.get("placements/").json()["results"])["b@v1"][2] is None
    assert admin.get("models/b/").json()["versions"][0]["live_tiers"] == {}


def test_the_past_has_the_placed_tier_of_then_and_no_live_one(admin: Api, head: int) -> None:
    said(1, a=("resident", 150.5), b=("host", 120.25))
    then = tiers_of(admin.get(f"placements/?as_of={head - 1}").json()["results"])
    assert then == {"a@v1": ("resident", 100.0, None, None), "b@v1": ("warm", 100.0, None, None)}
    (version,) = admin.get(f"models/b/?as_of={head - 1}").json()["versions"]
    assert (version["placed_tiers"], version["live_tiers"]) == ({"warm": 1}, {})


def test_a_decision_tells_its_changes_of_tier(admin: Api, head: int) -> None:
    body = admin.get(f"decisions/?version_id=b@v1&min_position={head}").json()["results"]
    assert [one["decision_id"] for one in body] == ["d2", "d1"]
    down, up = body[0]["retiered"]
    assert (down["before"], down["assignment"]["tier"], down["code"]) == (
        "resident", "warm", "less_asked"
    )  # fmt: skip
    assert (up["rate"], up["instead_of"]) == (8.0, [A.replica_id])
    told = admin.get("decisions/d2/").json()
    assert told["sentences"] == [
        f"Kept {A.replica_id}: b asks more.", f"Kept {B.replica_id}: b asks more."
    ]  # fmt: skip
    why = admin.get(f"placements/{B.replica_id}/explain/").json()
    assert (why["tier"], why["tier_since"], why["tier_reason"], why["decision_id"]) == (
        "resident", 200.0, "b asks more.", "d1"
    )  # fmt: skip
