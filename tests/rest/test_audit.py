"""The admin audit: every order, refused ones too, with what it changed, and no secret anywhere."""

from io import StringIO
from typing import Any

from django.core.management import call_command
from django.test import Client

from controlplane import bootstrap
from controlplane.entrypoints.rest.auditing import MAX_A_MINUTE, Brake
from tests.rest.conftest import PASSWORD, Api, key_of, login, position_of
from tests.rest.test_bad_input import problem


def audit(admin: Api, query: str = "") -> list[dict[str, Any]]:
    at = bootstrap.event_store().head().position
    answer = admin.get(f"audit/?min_position={at}&{query}")
    assert answer.status_code == 200, answer.content
    return list(answer.json()["results"])


def test_a_change_shows_what_was_and_what_became(admin: Api) -> None:
    """With actor, address, reason and the request id that is in the logs."""
    admin.post("tenants/", {"name": "acme"})
    answer = admin.patch("tenants/acme/", {"tier": "premium", "reason": "they pay"})
    entry = audit(admin)[0]
    assert entry["before"] == {"tenant acme": {"tier": "standard"}}
    assert entry["after"] == {"tenant acme": {"tier": "premium"}}
    assert (entry["actor"], entry["address"]) == ("user:root", "127.0.0.1")
    assert (entry["reason"], entry["outcome"]) == ("they pay", "done")
    assert entry["correlation_id"] == answer["X-Request-Id"]
    created = audit(admin, "action=TenantCreated")[0]
    assert created["before"] == {} and created["after"]["tenant acme"]["tier"] == "standard"


def test_changes_of_keys_models_and_routes_are_shown_too(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    key_id = admin.post("tenants/acme/keys/", {"name": "ci"}).json()["key_id"]
    admin.post(f"tenants/acme/keys/{key_id}/suspend/", {"reason": "leaked?"})
    entry = audit(admin, "action=ApiKeySuspended")[0]
    thing = f"api key {key_id}"
    assert entry["before"][thing] == {"suspended": False, "suspended_reason": ""}
    assert entry["after"][thing] == {"suspended": True, "suspended_reason": "leaked?"}
    admin.post("models/", {"name": "m"})
    admin.put("models/m/access/", {"public": False, "tenants": ["acme"]})
    entry = audit(admin, "action=ModelAccessChanged")[0]
    assert entry["before"]["model m"]["access"]["public"] is True
    assert entry["after"]["model m"]["access"]["tenants"] == ["acme"]


def test_prices_are_told_per_million_tokens(admin: Api) -> None:
    """As they were given, in what changed and in what was refused."""
    admin.post("models/", {"name": "m"})
    version = {"version": "v1", "source": "simulated://m", "gpu_memory": 1000}
    made = admin.post("models/m/versions/", version)
    assert made.status_code == 201, made.content
    told = {"input": "0.15", "cached_input": "0.075", "output": "0.6"}
    admin.put("models/m/versions/v1/price/", told)
    entry = audit(admin, "action=ModelPriceSet")[0]
    assert entry["before"]["version m@v1"]["price"]["input"] == "0"
    assert entry["after"] == {"version m@v1": {"price": told}}
    dear = {**told, "cached_input": "0.2"}
    assert problem(admin.put("models/m/versions/v1/price/", dear), 400) == "invalid_price"
    assert audit(admin)[0]["asked"]["price"] == dear


def test_refused_orders_stand_in_it_with_what_they_asked_for(admin: Api) -> None:
    """Refused by the domain, by the form and by the policy; a read that is refused is no order."""
    admin.post("tenants/", {"name": "acme"})
    assert problem(admin.patch("tenants/acme/", {"tier": "gold"}), 400) == "invalid_tier"
    entry = audit(admin)[0]
    assert (entry["action"], entry["outcome"], entry["code"]) == (
        "ChangeTier", "refused", "invalid_tier",
    )  # fmt: skip
    assert entry["asked"] == {"tenant_id": "acme", "tier": "gold"}
    assert problem(admin.patch("tenants/acme/", {"tires": 4}), 400) == "unknown_field"
    assert audit(admin)[0]["code"] == "unknown_field"
    viewer = login("vera", "viewer")
    assert problem(viewer.patch("tenants/acme/", {"tier": "free"}), 403) == "forbidden"
    entry = audit(admin)[0]
    assert (entry["actor"], entry["action"]) == ("user:vera", "PATCH Tenant")
    assert (entry["target"], entry["code"]) == ("tenant-acme", "forbidden")
    count = len(audit(admin))
    assert problem(viewer.get("requests/"), 403) == "forbidden"
    assert problem(admin.get("tenants/nobody/"), 404) == "tenant_not_found"
    dry = admin.patch("tenants/acme/?dry_run=true", {"tier": "gold"})
    assert problem(dry, 400) == "invalid_tier"
    assert len(audit(admin)) == count


def test_it_can_be_searched(admin: Api) -> None:
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name, "reason": f"for {name}"})
    assert {entry["target"] for entry in audit(admin, "q=GLOBEX")} == {"tenant-globex"}
    assert len(audit(admin, "target=tenant-acme")) == 1
    assert audit(admin, "outcome=refused") == [] and audit(admin, "actor=user:x") == []
    entries = audit(admin)
    at = entries[0]["at"]
    assert len(audit(admin, f"until={at - 0.001:.6f}")) < len(entries)
    assert audit(admin, f"since={at + 60:.3f}") == []
    first = admin.get("audit/?limit=1").json()
    second = Api(client=admin.client).client.get(first["next"]).json()
    assert second["results"][0]["position"] < first["results"][0]["position"]
    for bad in ("since=x", "since=1e9", "outcome=maybe", "who=me", "q="):
        problem(admin.get(f"audit/?{bad}"), 400)


def test_a_tenants_own_auditor_sees_its_own_entries_alone(admin: Api) -> None:
    """Also not who of another tenant tried a door here, nor that anybody did there."""
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name})
    mine = key_of(admin, "acme", "admin:write")
    foreign = key_of(admin, "globex", "admin:write")
    foreign.post("tenants/acme/keys/", {"name": "x"})
    mine.post("tenants/acme/suspend/", {})
    entries = audit(mine)
    assert {entry["target"] for entry in entries} == {"tenant-acme"}
    assert {entry["code"] for entry in entries} == {"", "forbidden"}
    assert problem(login("dev", "developer").get("audit/"), 403) == "forbidden"


def test_logins_and_users_stand_in_it_and_passwords_do_not(admin: Api) -> None:
    stranger = Client()
    for username, password in (("root", "a wrong guess"), ("my-password", "x"), ("root", PASSWORD)):
        body = {"username": username, "password": password}
        stranger.post("/api/v1/session/", body, "application/json")
    entries = audit(admin)
    assert [(e["action"], e["actor"]) for e in entries[:3]] == [
        ("SignedIn", "user:root"), ("SignIn", "anonymous"), ("SignIn", "user:root"),
    ]  # fmt: skip
    call_command("create_admin", username="ann", role="operator", stdout=StringIO())
    call_command("create_admin", username="ann", role="viewer", stdout=StringIO())
    saved = audit(admin, "action=DashboardUserSaved")
    assert [(e["before"], e["after"]["user ann"]["role"]) for e in saved] == [
        ({"user ann": {"role": "operator"}}, "viewer"), ({}, "operator"),
    ]  # fmt: skip
    assert saved[0]["actor"].startswith("cli:")
    everything = str(audit(admin, "limit=1000"))
    for secret in ("a wrong guess", "my-password", PASSWORD):
        assert secret not in everything


def test_a_script_that_is_always_refused_does_not_fill_the_log(admin: Api) -> None:
    brake = Brake(most=3)
    assert [brake.allows("a", now) for now in (0, 1, 2, 3, 61)] == [True, True, True, False, True]
    assert brake.allows("b", 3)
    admin.post("tenants/", {"name": "acme"})
    for _ in range(MAX_A_MINUTE + 20):
        admin.patch("tenants/acme/", {"x": 1})
    assert len(audit(admin, "code=unknown_field&limit=1000")) <= 2 * MAX_A_MINUTE


def test_no_secret_is_in_the_log_the_audit_or_an_export(admin: Api) -> None:
    """Of everything that was ever handed out: keys, rotated keys, tickets, session and CSRF
    tokens; nor one that somebody pasted into a reason."""
    admin.post("tenants/", {"name": "acme"})
    issued = admin.post("tenants/acme/keys/", {"name": "ci"}).json()
    path = f"tenants/acme/keys/{issued['key_id']}/"
    rotated = admin.post(f"{path}rotate/", {"reason": "scheduled"}).json()["secret"]
    audit(admin)  # the read model has the tenant now
    ticket = admin.post("tickets/", {"tenant": "acme"}).json()["ticket"]
    session = admin.client.cookies["sessionid"].value
    admin.post(f"{path}suspend/", {"reason": f"leaked {issued['secret']}"})
    admin.delete(path, headers={"X-Reason": f"leaked {rotated}"})
    admin.patch("tenants/acme/", {issued["secret"]: 1})
    last = admin.post(f"tenants/{ticket}/suspend/", {})
    assert last.status_code == 404
    admin.get(f"audit/?min_position={bootstrap.event_store().head().position}")
    texts = [str(audit(admin, "limit=1000")), str(admin.get("events/?limit=1000").json())]
    for kind in ("jsonl", "csv"):
        export = admin.get(f"exports/audit/?format={kind}")
        texts.append(b"".join(export.streaming_content).decode())
    texts.append(str([e.data for e in bootstrap.event_store().read_all(0, 1000)]))
    secrets = [issued["secret"].partition(".")[2], rotated.partition(".")[2], ticket]
    secrets += [session, admin.headers["X-CSRFToken"], PASSWORD]
    for secret in secrets:
        for text in texts:
            assert secret not in text
    assert "leaked [secret]" in texts[0]
    assert position_of(admin.get("events/")) > 0
