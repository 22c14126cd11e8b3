"""A tenant's API keys over the admin API: shown once, rotated, paused, for some models only."""

import time
from typing import Any

import pytest

from controlplane.adapters.access import keys
from tests.rest.conftest import Api, key_of, login, position_of
from tests.rest.test_bad_input import problem

ADMIN_KEY = {"name": "k", "scopes": ["admin:read"], "role": "admin"}


@pytest.fixture
def acme(admin: Api) -> Api:
    assert admin.post("tenants/", {"name": "acme"}).status_code == 201
    return admin


def issue(api: Api, body: dict[str, Any] = ADMIN_KEY) -> tuple[str, Api]:
    """``(key_id, a client with it)``."""
    answer = api.post("tenants/acme/keys/", body)
    assert answer.status_code == 201, answer.content
    return answer.json()["key_id"], Api(answer.json()["secret"])


def shown(api: Api, key_id: str, after: Any) -> dict[str, Any]:
    listed = api.get(f"tenants/acme/keys/?min_position={position_of(after)}").json()["results"]
    return next(key for key in listed if key["key_id"] == key_id)


def test_after_a_rotation_both_secrets_work_until_the_chosen_time(acme: Api) -> None:
    """The new one is shown once; in the list stands until when the old one is good, and which
    was used last."""
    key_id, old = issue(acme)
    until = time.time() + 3600
    answer = acme.post(f"tenants/acme/keys/{key_id}/rotate/", {"previous_valid_until": until})
    new = Api(answer.json()["secret"])
    assert new.get("status/").status_code == old.get("status/").status_code == 200
    row = shown(acme, key_id, answer)
    assert row["previous_valid_until"] == until and row["last4"] == answer.json()["last4"]
    assert row["last_used_at"] and row["previous_last_used_at"] and row["rotated_at"]


def test_rotating_with_no_overlap_ends_the_old_secret_at_once(acme: Api) -> None:
    key_id, old = issue(acme)
    answer = acme.post(f"tenants/acme/keys/{key_id}/rotate/", {"previous_valid_until": 0})
    assert Api(answer.json()["secret"]).get("status/").status_code == 200
    assert problem(old.get("status/"), 401) == "invalid_token"
    again = acme.post(f"tenants/acme/keys/{key_id}/rotate/", {"previous_valid_until": 9e12})
    assert problem(again, 400) == "invalid_expiry"
    assert Api(answer.json()["secret"]).get("status/").status_code == 200


def test_an_end_that_is_over_is_a_mistake_not_the_end_of_the_old_secret(acme: Api) -> None:
    """Somebody means "in an hour". A clock that is a few seconds behind means now."""
    key_id, old = issue(acme)
    path = f"tenants/acme/keys/{key_id}/rotate/"
    for until in (3600, 1, -1, time.time() - 3600):
        refused = acme.post(path, {"previous_valid_until": until})
        assert problem(refused, 400) in ("invalid_expiry", "invalid_time"), until
    assert old.get("status/").status_code == 200
    answer = acme.post(path, {"previous_valid_until": time.time() - 5})
    assert Api(answer.json()["secret"]).get("status/").status_code == 200
    assert problem(old.get("status/"), 401) == "invalid_token"


def test_a_secret_is_in_no_stored_answer(acme: Api) -> None:
    """A resend with the same Idempotency-Key gets the receipt, the first secret stays good and no
    second one is made."""
    key_id, _ = issue(acme)
    for path, body in (("", ADMIN_KEY), (f"{key_id}/rotate/", {})):
        headers = {"Idempotency-Key": f"once{path}"}
        first, second = [
            acme.post(f"tenants/acme/keys/{path}", body, headers=headers) for _ in range(2)
        ]
        assert first.json()["secret"] and second.json()["secret"] is None
        assert Api(first.json()["secret"]).get("status/").status_code == 200
        assert len(list(keys.ApiKeySecret.objects.filter(key_id=first.json()["key_id"]))) <= 2


def test_a_suspended_key_opens_nothing_until_it_is_resumed(acme: Api) -> None:
    key_id, key = issue(acme)
    path = f"tenants/acme/keys/{key_id}/"
    suspended = acme.post(f"{path}suspend/", {"reason": "leaked?"})
    assert problem(key.get("status/"), 401) == "invalid_token"
    row = shown(acme, key_id, suspended)
    assert (row["suspended"], row["suspended_reason"]) == (True, "leaked?")
    resumed = acme.post(f"{path}resume/", {})
    assert key.get("status/").status_code == 200
    assert shown(acme, key_id, resumed)["suspended"] is False


def test_a_dry_run_rotates_nothing(acme: Api) -> None:
    key_id, key = issue(acme)
    answer = acme.post(f"tenants/acme/keys/{key_id}/rotate/?dry_run=true", {})
    assert answer.json()["events"][0]["type"] == "ApiKeyRotated"
    assert key.get("status/").status_code == 200
    assert keys.ApiKeySecret.objects.filter(key_id=key_id).count() == 1


def test_a_revoked_keys_secrets_are_erased(acme: Api) -> None:
    key_id, key = issue(acme)
    acme.post(f"tenants/acme/keys/{key_id}/rotate/", {})
    assert acme.delete(f"tenants/acme/keys/{key_id}/").status_code == 200
    assert not keys.ApiKeySecret.objects.filter(key_id=key_id).exists()
    assert problem(key.get("status/"), 401) == "invalid_token"


def test_another_tenants_key_is_as_absent_as_one_that_never_was(acme: Api) -> None:
    """Under its owner's name and under one's own: the same body, whatever is asked of it."""
    acme.post("tenants/", {"name": "globex"})
    body = {"name": "x", "scopes": ["admin:write"], "role": "admin"}
    mine = Api(acme.post("tenants/globex/keys/", body).json()["secret"])
    foreign, _ = issue(acme)
    for method, path in (
        ("post", "rotate/"), ("post", "suspend/"), ("post", "resume/"), ("delete", "")
    ):  # fmt: skip
        for tenant in ("acme", "globex"):
            answers = [
                mine.call(method, f"tenants/{tenant}/keys/{key_id}/{path}", {})
                for key_id in (foreign, "0" * 12)
            ]
            codes = {problem(answer, 404) for answer in answers}
            bodies = {
                answer.content.replace(foreign.encode(), b"0" * 12).replace(
                    answer["X-Request-Id"].encode(), b""
                )
                for answer in answers
            }
            assert len(codes) == len(bodies) == 1, (method, path, tenant)


def test_a_developer_neither_rotates_nor_resumes_an_administrators_key(acme: Api) -> None:
    """A new secret of a key is as good as the key; pausing one is a matter of safety and free."""
    strong, _ = issue(acme)
    weak, _ = issue(acme, {"name": "ci"})
    ann = login("ann", "developer")
    assert problem(ann.post(f"tenants/acme/keys/{strong}/rotate/", {}), 403) == "forbidden_scope"
    assert problem(ann.post(f"tenants/acme/keys/{strong}/resume/", {}), 403) == "forbidden_scope"
    assert ann.post(f"tenants/acme/keys/{strong}/suspend/", {}).status_code == 200
    assert ann.post(f"tenants/acme/keys/{weak}/rotate/", {}).status_code == 200


def test_a_reason_may_come_in_a_header(acme: Api) -> None:
    """For calls without a body; it stands in the event."""
    key_id, _ = issue(acme)
    headers = {"X-Reason": "lost laptop, caf%C3%A9"}
    assert acme.delete(f"tenants/acme/keys/{key_id}/", headers=headers).status_code == 200
    (event,) = acme.get("events/?type=ApiKeyRevoked").json()["results"]
    assert event["reason"] == "lost laptop, café"
    for bad in ("x" * 501, "a%00b", "a%0Ab"):
        answer = acme.post("tenants/acme/suspend/", {}, headers={"X-Reason": bad})
        assert problem(answer, 400) == "invalid_reason"


def test_a_key_has_the_role_and_the_models_it_was_issued_with(acme: Api) -> None:
    acme.post("models/", {"name": "m"})
    answer = acme.post("tenants/acme/keys/", {"name": "ci", "models": ["m"]})
    row = shown(acme, answer.json()["key_id"], answer)
    assert (row["role"], row["scopes"], row["models"]) == ("developer", ["inference"], ["m"])
    bad = acme.post("tenants/acme/keys/", {"name": "ci", "role": "root"})
    assert problem(bad, 400) == "invalid_choice"


def test_a_key_for_nothing_is_refused_and_issued_for_inference_if_nothing_is_said(
    acme: Api,
) -> None:
    for scopes in ([], None):
        answer = acme.post("tenants/acme/keys/", {"name": "ci", "scopes": scopes})
        assert answer.status_code == 400, answer.content
        assert answer.json()["errors"][0]["pointer"] == "/scopes"
    answer = acme.post("tenants/acme/keys/", {"name": "ci"})
    assert shown(acme, answer.json()["key_id"], answer)["scopes"] == ["inference"]
    assert len(acme.get("tenants/acme/keys/").json()["results"]) == 1


def test_a_key_names_models_routes_and_aliases_that_there_are(acme: Api) -> None:
    """What its issuer's tenant may not use is answered as absent."""
    for name in ("m", "secret"):
        acme.post("models/", {"name": name})
    version = {"version": "v1", "source": "simulated://m", "gpu_memory": 1 << 30}
    for name in ("m", "secret"):
        acme.post(f"models/{name}/versions/", version)
        arms = [{"name": "a", "version_id": f"{name}@v1", "weight": 1}]
        acme.post("routes/", {"name": f"route-{name}", "arms": arms})
        acme.post(f"models/{name}/aliases/", {"alias": f"alias-{name}"})
    acme.put("models/secret/access/", {"public": False, "tenants": []})
    ours, hidden = (["m", "route-m", "alias-m"], ["secret", "route-secret", "alias-secret"])
    issuer = key_of(acme, "acme", "admin:read", "admin:write")
    for one in (*hidden, "nope", "m@v1"):
        answer = issuer.post("tenants/acme/keys/", {"name": "ci", "models": ["m", one]})
        assert problem(answer, 400) == "invalid_models", one
        assert f"There is no model, route or alias '{one}'." in answer.json()["detail"]
    assert issuer.post("tenants/acme/keys/", {"name": "ci", "models": ours}).status_code == 201
    everything = {"name": "ci", "models": [*ours, *hidden]}
    assert acme.post("tenants/acme/keys/", everything).status_code == 201
    refused = acme.post("tenants/acme/keys/", {"name": "ci", "models": ["nope"]})
    assert problem(refused, 400) == "invalid_models"
