"""Undo over REST: previewed, guarded, linked to what it undoes, and done by those who may."""

from typing import Any

from controlplane.adapters.readmodel.models import AuditEntry
from tests.rest.conftest import Api, key_of, login, position_of
from tests.rest.test_bad_input import problem


def tenant(admin: Api) -> int:
    """A tenant moved from free to premium; the position of that change."""
    admin.post("tenants/", {"name": "acme", "tier": "free"})
    return position_of(admin.patch("tenants/acme/", {"tier": "premium"}))


def tier(api: Api) -> Any:
    head = api.get("status/").json()["head"]
    return api.get(f"tenants/acme/?min_position={head}").json()["tier"]


def test_a_preview_shows_command_and_events_and_changes_nothing(admin: Api) -> None:
    position = tenant(admin)
    preview = admin.post(f"events/{position}/undo/?dry_run=true", {})
    assert preview.status_code == 200, preview.content
    body = preview.json()
    assert (body["undoes"], body["dry_run"], body["changed"]) == (position, True, True)
    assert body["commands"] == [
        {"type": "ChangeTier", "data": {"tenant_id": "acme", "tier": "free"}}
    ]
    assert [event["type"] for event in body["events"]] == ["TenantTierChanged"]
    assert admin.get("status/").json()["head"] == position and tier(admin) == "premium"


def test_an_undo_is_an_event_that_says_what_it_undoes(admin: Api) -> None:
    position = tenant(admin)
    etag = admin.post(f"events/{position}/undo/?dry_run=true", {})["ETag"]
    etag = f'"{int(etag.strip(chr(34))) - 1}"'  # a dry run shows the version it would be
    done = admin.post(f"events/{position}/undo/", {}, headers={"If-Match": etag})
    assert done.status_code == 200, done.content
    assert tier(admin) == "free"
    event = admin.get(f"events/?after={position}").json()["results"][0]
    assert event["undoes"] == position and str(position) in event["reason"]
    assert AuditEntry.objects.get(position=event["position"]).undoes == position
    before = admin.get(f"events/?after={position - 1}&limit=1").json()["results"][0]
    assert before["undoes"] is None
    twice = admin.post(f"events/{position}/undo/", {})
    assert problem(twice, 409) == "already_undone"
    redone = admin.post(f"events/{event['position']}/undo/", {"reason": "on purpose after all"})
    assert redone.status_code == 200 and tier(admin) == "premium"


def test_who_looked_at_an_older_state_is_told(admin: Api) -> None:
    position = tenant(admin)
    admin.put("tenants/acme/budgets/all/", {"limit": "5", "period": "day"})
    stale = admin.post(f"events/{position}/undo/", {}, headers={"If-Match": '"2"'})
    assert problem(stale, 412) == "version_conflict"
    admin.patch("tenants/acme/", {"tier": "standard"})
    assert problem(admin.post(f"events/{position}/undo/", {}), 409) == "changed_since"


def test_a_resent_undo_gets_the_first_answer(admin: Api) -> None:
    position, key = tenant(admin), {"Idempotency-Key": "u1"}
    first = admin.post(f"events/{position}/undo/", {}, headers=key)
    again = admin.post(f"events/{position}/undo/", {}, headers=key)
    assert first.status_code == again.status_code == 200
    assert again.content == first.content and again["Idempotent-Replayed"] == "true"


def test_an_issued_key_that_is_undone_opens_nothing(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    key = key_of(admin, "acme", "admin:read")
    position = admin.get("status/").json()["head"]
    admin.get(f"tenants/?min_position={position}")
    assert key.get("tenants/acme/").status_code == 200
    done = admin.post(f"events/{position}/undo/", {})
    assert done.json()["commands"][0]["type"] == "RevokeApiKey"
    assert key.get("tenants/acme/").status_code == 401
    lost = admin.post(f"events/{position_of(done)}/undo/", {})
    assert problem(lost, 409) == "not_undoable" and "secret" in lost.json()["detail"]


def test_a_name_that_was_taken_meanwhile_is_not_given_twice(admin: Api) -> None:
    for name in ("m", "other"):
        admin.post("models/", {"name": name})
    admin.post("models/m/aliases/", {"alias": "small"})
    removed = admin.delete("models/m/aliases/small/")
    added = admin.post("models/other/aliases/", {"alias": "small"})
    admin.get(f"models/?min_position={position_of(added)}")
    undone = admin.post(f"events/{position_of(removed)}/undo/", {})
    assert problem(undone, 409) == "name_taken"


def test_what_is_not_there_or_no_order_is_refused(admin: Api) -> None:
    tenant(admin)
    for position in (0, 99, 2**70):
        assert problem(admin.post(f"events/{position}/undo/", {}), 404) == "event_not_found"


def test_whoever_may_not_make_a_change_may_not_undo_it(admin: Api) -> None:
    position = tenant(admin)
    model = position_of(admin.post("models/", {"name": "m"}))
    alias = position_of(admin.post("models/m/aliases/", {"alias": "small"}))
    operator, viewer = login("ops", "operator"), login("eve", "viewer")
    assert operator.post(f"events/{alias}/undo/?dry_run=true", {}).status_code == 200
    assert problem(operator.post(f"events/{position}/undo/", {}), 403) == "forbidden"
    for one in (position, model, alias, 999):
        assert problem(viewer.post(f"events/{one}/undo/", {}), 403) == "forbidden"


def test_an_undo_keeps_to_what_holds_between_routes_and_versions(admin: Api) -> None:
    """What the order itself may not do, an undo may not, nor does its preview promise it."""
    spec = {"source": "simulated://m", "gpu_memory": 1 << 30}
    admin.post("models/", {"name": "m"})
    added = [
        position_of(admin.post("models/m/versions/", {**spec, "version": version}))
        for version in ("v1", "v2")
    ]
    arms = [{"name": "a", "version_id": "m@v2", "weight": 1}]
    admin.post("routes/", {"name": "chat", "arms": arms})
    for query in ("?dry_run=true", ""):
        assert problem(admin.post(f"events/{added[1]}/undo/{query}", {}), 409) == "in_use"
        assert problem(admin.post(f"events/{added[0]}/undo/{query}", {}), 409) == "in_use"
    deleted = position_of(admin.delete("routes/chat/"))
    assert admin.post(f"events/{added[1]}/undo/", {}).status_code == 200
    for query in ("?dry_run=true", ""):
        assert problem(admin.post(f"events/{deleted}/undo/{query}", {})) == "invalid_route"
