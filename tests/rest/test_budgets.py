"""Budgets over REST: what they count as of now, which apply, and that a change is in effect."""

import time
from typing import Any

import pytest

from controlplane import bootstrap
from controlplane.adapters.ledger.models import InferenceRequest, Usage
from controlplane.domain.budget import day_of
from controlplane.entrypoints.rest.sources import DatabaseSource
from controlplane.projections.tenants import Tenant
from tests.rest.conftest import Api, position_of
from tests.rest.test_bad_input import problem


def used(scope: str, target: str, tokens: int, milli: int = 0) -> None:
    Usage.objects.create(
        tenant_id="acme", scope=scope, target=target, day=day_of(time.time()), num_requests=1,
        num_prompt_tokens=tokens, num_output_tokens=0, price_milli=milli, price_pico=500_000_000,
    )  # fmt: skip


def running(subject: str, version_id: str) -> None:
    """Holds 8 tokens, at most a millionth of a dollar."""
    InferenceRequest.objects.create(
        request_id=f"req-{subject}-{version_id}", tenant_id="acme", subject=subject,
        endpoint="chat", requested_model="m", route="", arm="", version_id=version_id,
        latency_class="standard", num_prompt_tokens=3, max_output_tokens=5, reserved_tokens=8,
        reserved_price=1_000_000, at=time.time(), day=day_of(time.time()), gateway="g",
    )  # fmt: skip


def figures(api: Api, name: str) -> dict[str, Any]:
    body = api.get(f"tenants/acme/budgets/{name}/").json()
    return {field: body[field] for field in ("limit", "spent", "reserved", "remaining")}


def test_a_budget_shows_what_is_spent_and_held(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    admin.post("models/", {"name": "m"})
    used("tenant", "", 30, milli=1_250)
    key_id = admin.post("tenants/acme/keys/", {"name": "ci"}).json()["key_id"]
    used("key", key_id, 20)
    running(key_id, "m@v1")
    running("k2", "n@v1")
    for name, order in (
        ("all", {"limit": "100"}),
        ("cash", {"limit": "2.5", "unit": "money"}),
        ("ci", {"limit": "25", "scope": "key", "target": key_id, "period": "day"}),
        ("m", {"limit": "100", "scope": "model", "target": "m", "period": "total"}),
    ):
        assert admin.put(f"tenants/acme/budgets/{name}/", order).status_code == 200
    assert figures(admin, "all") == {
        "limit": "100", "spent": "30", "reserved": "16", "remaining": "54"
    }  # fmt: skip
    assert figures(admin, "cash") == {
        "limit": "2.5", "spent": "1.2505", "reserved": "0.000002", "remaining": "1.249498"
    }  # fmt: skip
    assert figures(admin, "ci") == {
        "limit": "25", "spent": "20", "reserved": "8", "remaining": "0"
    }  # fmt: skip
    assert figures(admin, "m")["spent"] == "0" and figures(admin, "m")["reserved"] == "8"


def test_which_budgets_apply_is_one_rule_for_keys_and_jwts(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    admin.post("models/", {"name": "big"})
    key_id = admin.post("tenants/acme/keys/", {"name": "ci"}).json()["key_id"]
    for name, scope, target in (
        ("all", "tenant", ""), ("ci", "key", key_id), ("ann", "key", "jwt:ann"),
        ("big", "model", "big"),
    ):  # fmt: skip
        body = {"limit": "5", "scope": scope, "target": target}
        assert admin.put(f"tenants/acme/budgets/{name}/", body).status_code == 200

    def named(query: str) -> list[str]:
        rows = admin.get(f"tenants/acme/budgets/?{query}").json()["results"]
        return [row["budget_id"] for row in rows]

    assert named("") == ["all", "ann", "big", "ci"]
    assert named(f"subject={key_id}") == ["all", "big", "ci"]
    assert named("subject=jwt:ann&model=big") == ["all", "ann", "big"]
    assert named("subject=jwt:bob&model=small") == ["all"]
    (key,) = admin.get("tenants/acme/keys/").json()["results"]
    assert [one["budget_id"] for one in key["applies"]] == ["all", "big", "ci"]


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("nine", "There is no model 'nine' that the budget 'one' could count."),
        ("m@v1", "There is no model 'm@v1' that the budget 'one' could count."),
        ("short", "'short' is an alias; a budget names the model itself, here 'm'."),
        ("chat", "'chat' is a route; a budget names a model that it leads to: m."),
    ],
)
def test_a_budget_of_what_is_no_model_is_refused_since_it_would_count_nothing(
    admin: Api, target: str, told: str
) -> None:
    admin.post("tenants/", {"name": "acme"})
    admin.post("models/", {"name": "m"})
    version = {"version": "v1", "source": "simulated://m", "gpu_memory": 1 << 30}
    admin.post("models/m/versions/", version)
    admin.post("models/m/aliases/", {"alias": "short"})
    arm = {"name": "a", "version_id": "m@v1", "weight": 1}
    assert admin.post("routes/", {"name": "chat", "arms": [arm]}).status_code == 201
    rule = {"scope": "model", "target": target, "limit": "5"}
    refused = admin.put("tenants/acme/budgets/one/", rule)
    assert problem(refused, 400) == "invalid_budget"
    assert refused.json()["errors"][0]["pointer"] == "/target"
    assert told in refused.json()["detail"]
    assert admin.put("tenants/acme/budgets/one/", {**rule, "target": "m"}).status_code == 200


def test_a_budget_of_a_key_that_the_tenant_has_not_is_refused(admin: Api) -> None:
    """A stranger's key is answered as an absent one; a login and a JWT have no key's row."""
    for name in ("acme", "umbrella"):
        admin.post("tenants/", {"name": name})
    theirs = admin.post("tenants/umbrella/keys/", {"name": "ci"}).json()["key_id"]
    own = admin.post("tenants/acme/keys/", {"name": "ci"}).json()["key_id"]
    rule = {"scope": "key", "limit": "5"}
    for target in ("nope", theirs):
        refused = admin.put("tenants/acme/budgets/one/", {**rule, "target": target})
        assert problem(refused, 400) == "invalid_budget"
        told = f"There is no key '{target}' that the budget 'one' could count."
        assert told in refused.json()["detail"]
    for target in (own, "jwt:ann", "user:ann"):
        answer = admin.put("tenants/acme/budgets/one/", {**rule, "target": target})
        assert answer.status_code == 200, answer.content


def test_a_change_is_in_effect_before_the_answer(admin: Api) -> None:
    """No reader needs to wait for a position: the rows that admissions read are there."""
    admin.post("tenants/", {"name": "acme"})
    path = "tenants/acme/budgets/all/"

    def limits() -> list[int]:
        row = DatabaseSource().get(Tenant, "acme")
        assert row is not None
        return [one.limit for one in row.budgets]

    for limit in ("5", "7", "0"):
        assert admin.put(path, {"limit": limit}).status_code == 200
        assert limits() == [int(limit)]
    again = admin.put(path, {"limit": "9"}, headers={"Idempotency-Key": "k"})
    assert limits() == [9] and again["ETag"]
    assert admin.put(path, {"limit": "9"}, headers={"Idempotency-Key": "k"})["Idempotent-Replayed"]
    stale = admin.put(path, {"limit": "1"}, headers={"If-Match": '"1"'})
    assert problem(stale, 412) == "version_conflict"
    assert admin.put(f"{path}?dry_run=true", {"limit": "1"}).json()["changed"] and limits() == [9]
    assert admin.delete(path).status_code == 200
    assert limits() == [] and problem(admin.get(path), 404) == "budget_not_found"


def test_a_reset_forgives_what_was_spent_and_leaves_the_usage(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    admin.put("tenants/acme/budgets/all/", {"limit": "40"})
    used("tenant", "", 30)
    reset = admin.post("tenants/acme/budgets/all/reset/", {"reason": "our outage"})
    assert reset.status_code == 200, reset.content
    body = admin.get("tenants/acme/budgets/all/").json()
    assert (body["spent"], body["remaining"], body["forgiven"]) == ("0", "40", "30")
    assert Usage.objects.get(scope="tenant").num_prompt_tokens == 30
    event = bootstrap.event_store().read_all(position_of(reset) - 1, 1)[0]
    assert event.type == "TenantBudgetReset" and event.meta.reason == "our outage"
    assert problem(admin.post("tenants/acme/budgets/no/reset/", {}), 404) == "budget_not_found"
