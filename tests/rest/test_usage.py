"""Usage over REST: any grouping sums to the same total, and everybody sees their own."""

from datetime import UTC, datetime
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane.adapters.ledger.models import Attempt, Head, InferenceRequest, Rollup, Usage
from controlplane.entrypoints.rest import usage_reading
from tests.rest.conftest import Api, key_of
from tests.rest.test_bad_input import problem

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
MAX = 2**62


def record(number: int, tenant_id: str, at: float = NOON, **fields: Any) -> None:
    """A request that ended as the ``number``-th."""
    defaults: dict[str, Any] = {
        "subject": "k1", "end_user": "", "endpoint": "chat", "requested_model": "m", "route": "",
        "arm": "", "version_id": "m@v1", "latency_class": "standard", "num_prompt_tokens": 40,
        "max_output_tokens": 60, "reserved_tokens": 100, "gateway": "g", "outcome": "ok",
        "num_output_tokens": 10, "price": MAX, "day": "2026-03-01",
    }  # fmt: skip
    InferenceRequest.objects.create(
        request_id=f"req-{number}", tenant_id=tenant_id, at=at, position=number,
        **(defaults | fields),
    )  # fmt: skip
    Head.objects.update_or_create(pk=1, defaults={"position": number})


def history() -> None:
    record(1, "acme", NOON - 1)
    record(2, "acme", NOON, subject="jwt:ann", end_user="u1", version_id="m@v2")
    record(3, "acme", NOON + 86_400, route="chat", arm="a", version_id="n@v1", outcome="error")
    record(4, "globex", NOON + 60, num_output_tokens=0, price=0)


def groups(api: Api, query: str) -> dict[str, int]:
    body = api.get(f"usage/?{query}").json()
    return {"/".join(row["group"].values()): row["num_requests"] for row in body["results"]}


def test_every_grouping_sums_to_the_records(admin: Api) -> None:
    history()
    assert groups(admin, "group_by=tenant") == {"acme": 3, "globex": 1}
    assert groups(admin, "group_by=key") == {"k1": 3, "jwt:ann": 1}
    assert groups(admin, "group_by=user") == {"": 3, "u1": 1}
    assert groups(admin, "group_by=model") == {"m": 3, "n": 1}
    assert groups(admin, "group_by=version&model=m") == {"m@v1": 2, "m@v2": 1}
    assert groups(admin, "group_by=route,arm&tenant=acme") == {"/": 2, "chat/a": 1}
    assert groups(admin, "group_by=day") == {"2026-03-02": 1, "2026-03-01": 3}
    assert groups(admin, "group_by=hour&tenant=acme&model=m") == {
        "2026-03-01T12:00:00Z": 1, "2026-03-01T11:00:00Z": 1
    }  # fmt: skip
    body = admin.get("usage/?group_by=key&limit=1").json()
    assert (body["count"], body["position"], body["behind"], len(body["results"])) == (2, 4, 0, 1)
    assert body["total"] == {
        "num_requests": 4, "num_failed": 1, "num_prompt_tokens": 160, "num_cached_tokens": 0,
        "num_output_tokens": 30, "price": "13835058.055282163712",
    }  # fmt: skip
    assert 3 * MAX == 13_835_058_055282163712


def test_a_period_is_of_whole_hours_and_says_which(admin: Api) -> None:
    history()
    query = "group_by=tenant&since=2026-03-01T13:59:00%2B01:00&until=2026-03-02T12:30:00Z"
    body = admin.get(f"usage/?{query}").json()
    assert (body["since"], body["until"]) == ("2026-03-01T12:00:00Z", "2026-03-02T12:00:00Z")
    assert body["total"]["num_requests"] == 2
    for wrong in ("yesterday", "2026-03-01", "2026-03-01T12:00:00"):
        assert problem(admin.get(f"usage/?since={wrong}"), 400) == "invalid_time"
    for wrong in ("password", "day,day", "day;tenant", ""):
        assert problem(admin.get(f"usage/?group_by={wrong}"), 400) in ("invalid_choice", "blank")


def test_a_tenant_sees_its_own_usage_and_attempts_only(admin: Api) -> None:
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name})
    history()
    Attempt.objects.create(
        request_id="req-4", position=4, choice=0, attempt=1, node_id="n1", replica_id="r",
        outcome="ok", error_code="", num_cached_tokens=0, num_output_tokens=0, queue_ms=None,
        started_at=1.0, duration_ms=2.0,
    )  # fmt: skip
    mine = key_of(admin, "acme", "admin:read")
    assert groups(mine, "group_by=tenant") == {"acme": 3}
    assert mine.get("usage/").json()["total"]["num_requests"] == 3
    assert mine.get("usage/?tenant=globex").status_code == 404
    assert problem(mine.get("requests/req-4/attempts/"), 404) == "request_not_found"
    assert mine.get("requests/req-1/attempts/").json()["results"] == []
    (one,) = admin.get("requests/req-4/attempts/").json()["results"]
    assert (one["node_id"], one["attempt"], one["outcome"]) == ("n1", 1, "ok")
    assert problem(mine.get("usage/check/"), 403) == "forbidden"


def test_an_answer_says_how_far_behind_it_is(admin: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records that one answer does not add up are counted, not passed over in silence."""
    history()
    monkeypatch.setattr(usage_reading, "MAX_BEHIND", 3)
    body = admin.get("usage/").json()
    assert (body["position"], body["behind"], body["total"]["num_requests"]) == (3, 1, 3)
    assert admin.get("usage/").json()["behind"] == 0


def test_the_last_check_is_shown_and_finds_a_changed_total(admin: Api) -> None:
    assert admin.get("usage/check/").json() == {"last": None}
    record(1, "acme", price=7)
    for scope, target in (("tenant", ""), ("key", "k1"), ("model", "m")):
        Usage.objects.create(
            tenant_id="acme", scope=scope, target=target, day="2026-03-01", num_requests=1,
            num_prompt_tokens=40, num_output_tokens=10, price_pico=7,
        )  # fmt: skip
    call_command("reconcile_usage", verbosity=0)
    last = admin.get("usage/check/").json()["last"]
    assert (last["num_records"], last["num_totals"], last["num_differences"]) == (1, 4, 0)
    Rollup.objects.update(num_output_tokens=11)
    with pytest.raises(CommandError, match="1 figures differ"):
        call_command("reconcile_usage", verbosity=0)
    last = admin.get("usage/check/").json()["last"]
    assert last["num_differences"] == 1
    assert last["differences"][0].endswith("num_output_tokens is 11, its records sum to 10")
    call_command("reconcile_usage", "--rebuild", verbosity=0)
    assert admin.get("usage/check/").json()["last"]["num_differences"] == 0
