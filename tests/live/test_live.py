"""What a listener hears: every event once and in order, telemetry, a heartbeat, or a reset."""

import asyncio
import random
import time
from typing import Any

import msgspec
import pytest

from controlplane import bootstrap
from controlplane.application.fleet import DeviceLoad, NodeLoad
from controlplane.domain import model, node, placement, route, tenant
from controlplane.domain.budget import Budget
from controlplane.domain.event_types import decode, schema_version
from controlplane.domain.ids import NodeId, ReplicaId, TenantId, VersionId
from controlplane.domain.policy import Principal
from controlplane.domain.version_spec import VersionSpec
from controlplane.entrypoints.live import hub as hub_module
from controlplane.entrypoints.live.hub import Subscriber
from controlplane.entrypoints.rest import reading
from controlplane.entrypoints.rest.sources import DatabaseSource, FoldedSource, Source
from controlplane.projections.fold import STATE, Folder, fold_rows
from tests.live.conftest import META, Live, create_tenant, fresh_key

LOAD = NodeLoad(
    node_id="n1", boot_id="b", seq=1, at=1.0, acked_epoch=1, acked_generation=1, draining=False,
    devices=(DeviceLoad(0, 0.5, 1, 2, 0, 40.0, 10.0),), replicas=(),
)  # fmt: skip

FLEET = Principal("user:test", "viewer")


async def test_a_listener_hears_from_now_on(live: Live, operator: str) -> None:
    create_tenant("before")
    async with live.subscribed(operator) as one:
        hello = await one.next()
        assert (hello["type"], hello["position"]) == ("hello", 3)
        create_tenant("acme")
        event = await one.next("event")
        assert (event["position"], event["event_type"]) == (4, "TenantCreated")
        assert event["data"]["tenant_id"] == "acme" and event["actor"] == "user:test"
        heartbeat = await one.next("heartbeat")
        assert heartbeat["position"] == 4 and abs(heartbeat["at"] - time.time()) < 5


async def test_a_listener_resumes_where_it_was_without_gap_or_repeat(
    live: Live, operator: str
) -> None:
    for index in range(30):
        create_tenant(f"t{index}")
    async with live.subscribed(operator, after=7) as one:
        assert (await one.next("hello"))["position"] == 7
        heard = [(await one.next("event"))["position"] for _ in range(25)]
        for index in range(30, 60):
            await asyncio.to_thread(create_tenant, f"t{index}")
        heard += [(await one.next("event"))["position"] for _ in range(30)]
    assert heard == list(range(8, 63))


async def test_listeners_joining_in_the_middle_of_writing_miss_nothing(
    live: Live, operator: str
) -> None:
    stop = asyncio.Event()

    async def write() -> None:
        index = 0
        while not stop.is_set():
            index += 1
            await asyncio.to_thread(create_tenant, f"t{index}")

    async def hear(after: int) -> None:
        async with live.subscribed(operator, after=after) as one:
            heard = [(await one.next("event", seconds=20))["position"] for _ in range(40)]
        assert heard == list(range(after + 1, after + 41))

    writer = asyncio.create_task(write())
    await asyncio.gather(*(hear(after) for after in (0, 1, 2, 5, 9, 0)))
    stop.set()
    await writer


@pytest.mark.parametrize("after", [10**6, 0])
async def test_too_far_behind_or_ahead_is_a_reset(
    live: Live, operator: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "MAX_BEHIND", 2)
    for index in range(5):
        create_tenant(f"t{index}")
    async with live.subscribed(operator, after=after) as one:
        reset = await one.next()
        assert (reset["type"], reset["position"]) == ("reset", 7)
        create_tenant("next")
        assert (await one.next("event"))["position"] == 8


def test_a_queue_is_bounded_and_its_loss_is_said() -> None:
    subscriber = Subscriber(None, telemetry=True)
    for position in range(hub_module.MAX_WAITING + 10):
        subscriber.put("{}", position)
    assert len(subscriber.waiting) <= hub_module.MAX_WAITING
    first = msgspec.json.decode(subscriber.waiting[0])
    assert first == {"type": "reset", "position": hub_module.MAX_WAITING}


async def test_telemetry_reaches_those_who_may_see_nodes(live: Live, operator: str) -> None:
    create_tenant("acme")
    mine = await fresh_key("acme", "admin:read")
    async with live.subscribed(operator) as one, live.subscribed(mine) as confined:
        await one.next("hello")
        await confined.next("hello")
        await asyncio.sleep(0)
        live.fleet.say(LOAD)
        telemetry = await one.next("telemetry")
        assert telemetry["node_id"] == "n1" and telemetry["devices"][0]["utilization"] == 0.5
        heard = [(await confined.next())["type"] for _ in range(2)]
        assert heard == ["heartbeat", "heartbeat"]


async def test_a_process_hears_the_nodes_also_while_nobody_watches(live: Live) -> None:
    """Its GETs tell where replicas are now; there is one subscription, whoever asks first."""
    live.hub.hear()
    live.hub.hear()
    await asyncio.sleep(0)
    live.fleet.say(LOAD)
    assert live.hub.loads.latest("n1") == LOAD
    assert live.fleet.num_listening == 1


async def test_a_tenant_hears_only_of_itself(live: Live) -> None:
    create_tenant("acme")
    async with live.subscribed(await fresh_key("acme", "admin:read"), after=0) as one:
        create_tenant("globex")
        assert (await one.next("event"))["stream"] == "tenant-acme"
        await one.next("heartbeat")
        assert (await one.next())["type"] == "heartbeat"


async def test_each_payload_is_made_once_for_all(
    live: Live, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    original = hub_module._event_message

    def counted(recorded: Any) -> str:
        nonlocal made
        made += 1
        return original(recorded)

    monkeypatch.setattr(hub_module, "_event_message", counted)
    async with live.subscribed(operator) as a, live.subscribed(operator) as b:
        await a.next("hello")
        await b.next("hello")
        create_tenant("acme")
        assert await a.next("event") == await b.next("event")
    assert made == 1


# --- the pushed events are the whole truth ------------------------------------------------------
def _budget(limit: int) -> Budget:
    return Budget("default", "tenant", "", "tokens", limit, "day")


def write_something(rng: random.Random, index: int) -> None:
    """One random change of tenants, catalog, routes, fleet or placement."""
    handler = bootstrap.command_handler()
    name, now = f"x{index % 4}", float(index)

    def handle(decider: Any, target: str, command: Any) -> None:
        handler.handle(decider, f"{decider.category}-{target}", command, META)

    node_id, version_id = NodeId(f"n{index % 2}"), VersionId(f"{name}@v1")
    spec = VersionSpec(version="v1", source="simulated://x", gpu_memory=1024)
    replica = ReplicaId(f"{name}.v1.g{index}.0")
    one = placement.Assignment(replica, version_id, node_id, 0, 1024)
    plan = placement.DecidePlacement(
        f"d{index}", index, (placement.Started(one, "fits", (), ()),), (), (), now
    )
    devices = (node.DeviceInfo(0, "cpu", "cpu", 4096),)
    reports = (
        node.NodeJoined(node_id, "b", "z", devices, now),
        node.ReplicaBecameReady(node_id, replica, version_id, 0, 1, 2, 3, 0.5, "", now),
    )
    arms = (route.Arm("a", version_id, rng.random() + 0.1),)
    choices: list[tuple[Any, str, Any]] = [
        (tenant.DECIDER, name, tenant.CreateTenant(TenantId(name), name, "free", now)),
        (tenant.DECIDER, name, tenant.SetBudget(TenantId(name), _budget(index), now)),
        (model.DECIDER, name, model.RegisterModel(name, now)),
        (model.DECIDER, name, model.AddVersion(name, spec, now)),
        (model.DECIDER, name, model.AddAlias(name, f"alias{index % 7}", now)),
        (route.DECIDER, name, route.CreateRoute(name, arms, True, now)),
        (route.DECIDER, name, route.DeleteRoute(name, now)),
        (node.DECIDER, node_id, node.RecordNodeEvents(node_id, reports, now)),
        (node.DECIDER, node_id, node.DrainNode(node_id, "test", now)),
    ]
    if rng.random() < 0.2:
        handler.handle(placement.DECIDER, placement.STREAM, plan, META)
        return
    try:
        handle(*rng.choice(choices))
    except Exception as error:
        assert type(error).__name__ in ("NotFound", "Conflict"), error


def shown(source: Source) -> dict[str, Any]:
    """Everything a dashboard shows of the state."""
    query = {"limit": 1000, "offset": 0}
    return {
        "tenants": reading.tenants(source, query, None),
        "models": reading.models(source, query, FLEET),
        "routes": reading.routes(source, query, FLEET),
        "nodes": reading.nodes(source, query),
        "placements": reading.placements(source, query),
    }


@pytest.mark.parametrize("seed", range(3))
async def test_pushed_events_on_an_old_snapshot_equal_a_fresh_fetch(
    live: Live, operator: str, seed: int
) -> None:
    rng = random.Random(seed)
    for index in range(60):
        await asyncio.to_thread(write_something, rng, index)
    store = bootstrap.event_store()
    after = store.head().position // 2
    rows = fold_rows(store.read_all(0, 10_000, after), STATE)
    folder = Folder(rows, STATE)
    async with live.subscribed(operator, after=after) as one:
        for index in range(60, 120):
            await asyncio.to_thread(write_something, rng, index)
        head = store.head().position
        for position in range(after + 1, head + 1):
            frame = await one.next("event")
            assert frame["position"] == position
            folder.apply(from_frame(frame))
    await asyncio.to_thread(bootstrap.projector().catch_up_all)
    fresh = await asyncio.to_thread(shown, DatabaseSource())
    assert shown(FoldedSource(rows)) == fresh
    assert fresh["placements"][0] > 0 and fresh["models"][0] > 0


class Pushed(msgspec.Struct, frozen=True):
    """What a client knows of an event: the frame, in the shape that projections take."""

    position: int
    version: int
    stream: str
    type: str
    meta: Any
    event: Any


def from_frame(frame: dict[str, Any]) -> Pushed:
    kind = frame["event_type"]
    event = decode(kind, schema_version(kind), msgspec.json.encode({**frame["data"], "type": kind}))
    return Pushed(frame["position"], frame["version"], frame["stream"], kind, META, event)
