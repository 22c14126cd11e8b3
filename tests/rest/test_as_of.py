"""Every GET of the admin API can be turned back: what it says ``as_of`` a position is what it
answered when the log was there."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.db import connection

from controlplane import bootstrap
from controlplane.adapters.ledger.batch import admit_all, day_of, settle_all
from controlplane.adapters.ledger.models import InferenceRequest
from controlplane.adapters.ledger.statements import statements
from controlplane.application.ports import EventMeta
from controlplane.domain import node, placement, scaling
from controlplane.domain.decider import Command
from controlplane.domain.ids import NodeId, ReplicaId, VersionId
from controlplane.entrypoints.rest import reading, spending
from controlplane.entrypoints.rest.urls import urlpatterns
from tests.benchmarks.long_history import requests
from tests.domain.samples import CANDIDATE, DEVICES
from tests.rest.conftest import Api, position_of

OPENAPI = Path(__file__).resolve().parents[2] / "frontend" / "openapi.json"
SPEC = {"version": "v1", "source": "simulated://demo", "gpu_memory": 1 << 30}
META = EventMeta("system:controller")

# Why a GET cannot be turned back.
NOW_ONLY = {
    "session_retrieve": "says who is logged in now",
    "session_methods": "says how one may log in now",
    "status_retrieve": "says how this installation is now",
    "placements_repack": "says what could be moved now",
    "decisions_replay": "computes what an event says again: the same whenever it is asked",
    "checkpoints_list": "each checkpoint says itself of which size of the log it is",
    "checkpoints_consistency": "takes two sizes of the log",
    "checkpoints_inclusion": "takes a position and a size of the log",
    "checkpoints_keys": "says whose signatures to believe now",
    "verification_retrieve": "says what the last check found, and when",
    "attempts_list": "a request's tries, each with its own times",
    "usage_list": "takes a stretch of days",
    "usage_check": "says what the last check found, and when",
    "audit_export": "takes any stretch of positions: after, upto",
    "requests_text": "can be read as long as its key is there, whatever the moment",
    "retention_list": "says what holds now; what held before is in the audit",
    "retention_retrieve": "says what holds now; what held before is in the audit",
}
# An address for each that can.
PATHS = {
    "tenants_list": "tenants/",
    "tenants_retrieve": "tenants/acme/",
    "budgets_list": "tenants/acme/budgets/",
    "budgets_retrieve": "tenants/acme/budgets/all/",
    "keys_list": "tenants/acme/keys/",
    "models_list": "models/",
    "models_retrieve": "models/m/",
    "versions_list": "models/m/versions/",
    "versions_retrieve": "models/m/versions/v1/",
    "aliases_list": "models/m/aliases/",
    "routes_list": "routes/",
    "routes_retrieve": "routes/chat/",
    "nodes_list": "nodes/",
    "nodes_retrieve": "nodes/n1/",
    "placements_list": "placements/",
    "decisions_list": "decisions/",
    "decisions_retrieve": "decisions/d1/",
    "scalings_list": "scalings/",
    "forecasts_list": "forecasts/",
    "preloads_list": "preloads/",
    "preloads_totals": "preloads/totals/",
    "placements_explain": "placements/m.v1.g1.0/explain/",
    "placements_what_if": "placements/what-if/?lose_node=n1",
    "events_list": "events/",
    "requests_list": "requests/",
    "audit_list": "audit/",
    "requests_retrieve": "requests/r1/",
    "routing_weights_retrieve": "routing/weights/",
    "requests_dispatch": "requests/r1/dispatch/",
    "catalog_export": "apply/",
}


def reads() -> dict[str, list[str]]:
    """Operation id -> names of its query parameters, of every GET below /api/v1/."""
    paths = json.loads(OPENAPI.read_text())["paths"]
    return {
        found["get"]["operationId"]: [one["name"] for one in found["get"].get("parameters", [])]
        for found in paths.values()
        if "get" in found
    }


def test_every_get_takes_as_of_or_says_why_not() -> None:
    described, served = reads(), [p for p in urlpatterns if hasattr(p.callback.view_class, "get")]
    assert len(described) == len(served)
    for operation, parameters in described.items():
        assert ("as_of" in parameters) != (operation in NOW_ONLY), operation
    assert set(described) == set(PATHS) | set(NOW_ONLY)


def test_what_was_answered_then_is_answered_as_of_then(admin: Api) -> None:
    """By position and by time, after everything that can be changed was changed."""
    position = build(admin)
    admin.get(f"status/?min_position={position}")
    then = {name: answer(admin, asking(path, "min_position", position), path)
            for name, path in PATHS.items()}  # fmt: skip
    moment = time.time()
    time.sleep(0.01)
    change_everything(admin)
    stamp = f"{moment:.6f}"
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + "." + stamp[-6:] + "Z"
    for name, path in PATHS.items():
        for as_of in (str(position), when):
            assert answer(admin, asking(path, "as_of", as_of), path) == then[name], (name, as_of)
        changed = answer(admin, path, path) != then[name]
        assert changed or name == "decisions_retrieve", f"{name} was not changed: proves nothing"


def asking(path: str, name: str, value: object) -> str:
    return f"{path}{'&' if '?' in path else '?'}{name}={value}"


def answer(api: Api, address: str, path: str) -> Any:
    if path.startswith(("events", "requests", "apply", "routing")):  # these are never behind
        address = address.partition("?min_position")[0]
    got = api.get(address)
    assert got.status_code == 200, (address, got.content)
    body = got.content.decode()
    return body if path.startswith("apply") else without_now(json.loads(body))


def without_now(body: Any) -> Any:
    """Without links, which repeat the address, and what is known for now only."""
    if isinstance(body, dict):
        hidden = {"next", "previous", "last_used_at"}
        return {name: without_now(value) for name, value in body.items() if name not in hidden}
    return [without_now(one) for one in body] if isinstance(body, list) else body


def record(*events: Any) -> int:
    handler = bootstrap.command_handler()
    command = node.RecordNodeEvents(NodeId("n1"), events, time.time())
    return handler.handle(node.DECIDER, "node-n1", command, META).position


def decide(decision_id: str, replica: str) -> int:
    assignment = placement.Assignment(
        ReplicaId(replica), VersionId("m@v1"), NodeId("n1"), 0, 1 << 30
    )
    started = placement.Started(assignment, "It fits.", (CANDIDATE,), ())
    command = placement.DecidePlacement(decision_id, 1, (started,), (), (), time.time())
    handler = bootstrap.command_handler()
    return handler.handle(placement.DECIDER, placement.STREAM, command, META).position


def demand(*commands: Command) -> None:
    handler = bootstrap.command_handler()
    for command in commands:
        handler.handle(scaling.DECIDER, scaling.STREAM, command, META)


def load_ahead(before: int, at: float) -> None:
    """Expected, loaded ahead, judged."""
    v1, until = VersionId("m@v1"), at + 300
    expected = (scaling.Expected(v1, 1.5, "arima"),)
    reading = (scaling.Reading("expected", 1.5),)
    demand(
        scaling.RecordForecast(until, expected, (), at),
        scaling.ScaleReplicas(v1, before, before + 1, "preload", "1.5", reading, at, until),
        scaling.JudgePreload(v1, 2, 41.0, until),
    )


def build(admin: Api) -> int:
    """One of everything; a request is running when the last event is recorded."""
    admin.post("tenants/", {"name": "acme", "tier": "free"})
    admin.post("tenants/acme/keys/", {"name": "ci"})
    admin.put("tenants/acme/budgets/all/", {"limit": "1000", "period": "total"})
    admin.post("models/", {"name": "m"})
    admin.post("models/m/versions/", SPEC)
    admin.post("models/m/aliases/", {"alias": "small"})
    arms = [{"name": "a", "version_id": "m@v1", "weight": 1}]
    admin.post("routes/", {"name": "chat", "arms": arms})
    record(node.NodeJoined(NodeId("n1"), "b1", "z1", DEVICES, 1.0))
    a_request("r1")
    load_ahead(0, 10.0)
    return decide("d1", "m.v1.g1.0")


def a_request(request_id: str) -> None:
    InferenceRequest.objects.create(
        request_id=request_id, tenant_id="acme", subject="k", endpoint="chat.completions",
        requested_model="m", version_id="m@v1", latency_class="interactive",
        num_prompt_tokens=10, max_output_tokens=20, reserved_tokens=30, at=time.time(),
        day=day_of(time.time()), gateway="g",
    )  # fmt: skip


def change_everything(admin: Api) -> None:
    admin.patch("tenants/acme/", {"tier": "premium"})
    admin.post("tenants/acme/keys/", {"name": "second"})
    admin.put("tenants/acme/budgets/all/", {"limit": "5", "period": "day"})
    admin.post("models/m/versions/v1/scale/", {"min_replicas": 0, "max_replicas": 3})
    admin.post("models/m/versions/", {**SPEC, "version": "v2"})
    admin.delete("models/m/aliases/small/")
    arms = [{"name": "a", "version_id": "m@v1", "weight": 7}]
    admin.put("routes/chat/", {"arms": arms, "sticky": False})
    admin.patch("routing/weights/", {"beta": 2.0})
    record(node.NodeJoined(NodeId("n1"), "b2", "z9", DEVICES, 2.0))
    InferenceRequest.objects.filter(request_id="r1").update(
        outcome="ok", num_output_tokens=7, ended_at=time.time(), position=1
    )
    decide("d2", "m.v1.g2.0")
    load_ahead(1, 400.0)
    about = (NodeId("n1"), ReplicaId("m.v1.g1.0"), VersionId("m@v1"))
    record(node.ReplicaBecameReady(*about, 0, 1, 2, 3, 0.5, "ab", 3.0))
    last = admin.post("tenants/acme/suspend/", {"reason": "unpaid"})
    admin.get(f"tenants/?min_position={position_of(last)}")


def test_loads_ahead_are_listed_newest_first_filtered_and_added_up(admin: Api) -> None:
    build(admin)
    load_ahead(1, 400.0)
    v1 = VersionId("m@v1")
    wake = scaling.ScaleReplicas(v1, 0, 1, "woken", "1 request came", (), 900.0)
    demand(
        scaling.ScaleReplicas(v1, 2, 0, "idle", "Nobody came.", (), 800.0),
        wake,
        scaling.ScaleReplicas(v1, 1, 0, "idle", "Nobody came.", (), 1000.0),
        scaling.ScaleReplicas(v1, 0, 1, "preload", "1.5", (), 1100.0, 1400.0),
        scaling.JudgePreload(v1, 0, None, 1400.0),
    )
    position = bootstrap.event_store().head().position
    found = admin.get(f"preloads/?min_position={position}").json()["results"]
    assert [one["outcome"] for one in found] == ["wasted", "missed", "hit", "hit"]
    page = admin.get("preloads/?limit=3").json()
    assert admin.get(page["next"].split("/api/v1/")[1]).json()["results"] == found[3:]
    assert admin.get("preloads/?outcome=missed").json()["results"] == found[1:2]
    assert admin.get("preloads/?version_id=m@v2").json()["results"] == []
    (total,) = admin.get("preloads/totals/").json()["results"]
    assert total == {"version_id": "m@v1", "num_hits": 2, "num_wasted": 1, "num_missed": 1,
                     "ahead_s": 82.0, "wasted_s": 300.0}  # fmt: skip
    scaled = admin.get("scalings/?code=woken").json()["results"]
    assert [(one["before"], one["after"], one["reason"]) for one in scaled] == [
        (0, 1, "1 request came")
    ]
    assert admin.get("scalings/?code=preload").json()["results"][-1]["readings"] == [
        {"name": "expected", "value": 1.5}
    ]
    assert admin.get("scalings/?code=other").status_code == 400


def test_a_decision_is_not_there_before_it_was_made(admin: Api) -> None:
    position = build(admin)
    admin.get(f"nodes/?min_position={position}")
    assert admin.get(f"decisions/d1/?as_of={position}").status_code == 200
    assert admin.get(f"decisions/d1/?as_of={position - 1}").status_code == 404
    assert admin.get(f"decisions/?as_of={position - 1}").json()["results"] == []
    assert admin.get(f"decisions/?version_id=m@v1&as_of={position}").json()["results"]
    assert admin.get(f"decisions/?version_id=m@v2&as_of={position}").json()["results"] == []


def test_a_request_that_ended_later_was_running(admin: Api) -> None:
    position = build(admin)
    change_everything(admin)
    for query, found in (("", 1), ("&outcome=running", 1), ("&outcome=ok", 0), ("&model=m", 1)):
        page = admin.get(f"requests/?as_of={position}{query}").json()["results"]
        assert [row["outcome"] for row in page] == ["running"] * found, query
    assert admin.get("requests/r1/?as_of=1").status_code == 404
    assert admin.get("requests/?outcome=ok&model=m@v1").json()["results"][0]["position"] == 1


def test_what_was_spent_is_turned_back_too(admin: Api) -> None:
    """At every moment the sum of what had ended by then; across midnight and months. A request
    counts in the month that it was admitted in, while it runs and when it has ended."""
    admin.post("tenants/", {"name": "acme"})
    last = admin.put("tenants/acme/budgets/all/", {"limit": "9999999", "period": "month"})
    admin.get(f"tenants/?min_position={position_of(last)}")
    midnight = 1_764_547_200.0  # 2025-12-01T00:00Z
    begun = [midnight + hours * 3600 for hours in (-30, -2, -0.01, 0.5, 26, 49)]
    with LedgerFill() as fill:
        for number, at in enumerate(begun):
            fill.request(f"r{number}", at, at + 3600, 10**number)
    for moment in (midnight - 60, midnight + 60, midnight + 4000, midnight + 86_400 * 2.3):
        then = spending.Moment(moment, past=True)
        got = spending.budget(reading.DatabaseSource(), "acme", "all", then).body
        month = "2025-11" if moment < midnight else "2025-12"
        counted = {n: at for n, at in enumerate(begun) if day_of(at) >= f"{month}-01"}
        ended = [10**n for n, at in counted.items() if at + 3600 <= moment]
        running = [at for at in counted.values() if at <= moment < at + 3600]
        expected = (str(sum(ended)), str(30 * len(running)))
        assert (got["spent"], got["reserved"]) == expected, moment


class LedgerFill:
    """Requests that ended, through the ledger's own statements."""

    def __enter__(self) -> "LedgerFill":
        connection.ensure_connection()
        self.cursor, self.sql = connection.connection.cursor(), statements(connection.vendor)
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def request(self, request_id: str, at: float, ended_at: float, tokens: int) -> None:
        intent, terminal = next(requests(1))
        intent = replace(
            intent, request_id=request_id, tenant_id="acme", at=at, num_prompt_tokens=10,
            max_output_tokens=20,
        )  # fmt: skip
        terminal = replace(
            terminal, request_id=request_id, at=ended_at, num_prompt_tokens=tokens,
            num_output_tokens=0,
        )  # fmt: skip
        self.cursor.execute(self.sql.begin)
        admit_all(self.cursor, self.sql, [intent])
        settle_all(self.cursor, self.sql, [terminal])
        self.cursor.execute("COMMIT")
