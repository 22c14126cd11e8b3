"""Nobody reaches anything without a rule that says so, and a stranger's thing looks absent."""

from collections.abc import Iterator
from typing import Any

from controlplane.domain.policy import WRITE, Principal, allowed
from controlplane.entrypoints.rest.views.session import Session, SignInMethods
from tests.architecture.access import patterns
from tests.rest.conftest import PASSWORD, Api, key_of, login, position_of
from tests.rest.test_bad_input import SPEC, WRITES, problem


def addresses() -> Iterator[str]:
    """Every address of the API with its parameters filled in."""
    values = {"tenant_id": "acme", "name": "m", "version": "v1", "alias": "a", "key_id": "k"}
    for address, callback in patterns():
        if address.startswith("api/v1/") and callback.cls not in (Session, SignInMethods):
            for part in ("tenant_id", "key_id", "name", "version", "alias", "node_id",
                         "decision_id", "request_id", "replica_id"):  # fmt: skip
                address = address.replace(f"<str:{part}>", values.get(part, "x"))
            address = address.replace("<int:position>", "1")
            yield address.removeprefix("api/v1/")


def test_strangers_get_401_everywhere() -> None:
    forged = ("", "sk_0123456789ab." + "x" * 43, "' OR '1'='1", "eyJhbGciOiJub25lIn0.e30.")
    tries = [("get", token) for token in forged]
    tries += [(method, "") for method in ("post", "put", "patch", "delete")]
    for path in addresses():
        for method, token in tries:
            answer = Api(token).call(method, path, {})
            assert problem(answer, 401) in ("not_authenticated", "invalid_token")
            assert answer["WWW-Authenticate"].startswith("Bearer")


def test_an_inference_key_administers_nothing(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    key = key_of(admin, "acme", "inference")
    for path in addresses():
        assert problem(key.get(path), 403) == "forbidden"


def test_a_foreign_thing_answers_exactly_as_an_absent_one(admin: Api) -> None:
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name})
        admin.post("models/", {"name": f"of-{name}"})
        last = admin.put(f"models/of-{name}/access/", {"public": False, "tenants": [name]})
    mine = key_of(admin, "acme", "admin:read", "admin:write")
    admin.get(f"tenants/?min_position={position_of(last)}")
    for path in ("tenants/{}/", "tenants/{}/budgets/", "tenants/{}/keys/", "models/of-{}/",
                 "models/of-{}/versions/", "models/of-{}/aliases/",
                 "requests/?tenant={}", "exports/audit/?tenant={}"):  # fmt: skip
        foreign, absent = mine.get(path.format("globex")), mine.get(path.format("nobody"))
        assert foreign.status_code == absent.status_code == 404, path
        assert _body(foreign, "globex") == _body(absent, "nobody"), path
        assert mine.get(path.format("acme")).status_code == 200, path
    for foreign, absent in (
        [mine.post(f"tenants/{name}/keys/", {"name": "x"}) for name in ("globex", "nobody")],
        [mine.delete(f"tenants/{name}/keys/k/") for name in ("globex", "nobody")],
        [mine.post("tickets/", {"tenant": name}) for name in ("globex", "nobody")],
    ):
        assert _body(foreign, "globex") == _body(absent, "nobody")
        assert foreign.status_code == 404


def test_who_else_may_use_a_model_is_not_shown(admin: Api) -> None:
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name})
    admin.post("models/", {"name": "shared"})
    last = admin.put("models/shared/access/", {"public": False, "tenants": ["acme", "globex"]})
    admin.get(f"tenants/?min_position={position_of(last)}")
    mine = key_of(admin, "acme", "admin:read")
    for path in ("models/", "models/shared/"):
        assert b"globex" not in mine.get(path).content
    assert mine.get("models/shared/").json()["access"]["tenants"] == ["acme"]
    assert b"globex" in admin.get("models/shared/").content


def _body(answer: Any, name: str) -> bytes:
    """The answer without what differs by request: its id, and the name that was asked for."""
    body = answer.json()
    body.pop("request_id")
    return str(body).replace(name, "*").encode()


def test_lists_and_events_show_a_tenant_only_itself(admin: Api) -> None:
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name})
    mine = key_of(admin, "acme", "admin:read")
    at = admin.get("status/").json()["head"]
    admin.get(f"tenants/?min_position={at}")
    assert [tenant["name"] for tenant in mine.get("tenants/").json()["results"]] == ["acme"]
    streams = {event["stream"] for event in mine.get("events/").json()["results"]}
    assert streams == {"tenant-acme"}
    assert b"globex" not in b"".join(mine.get("exports/audit/").streaming_content)
    assert mine.get("events/?stream=tenant-globex").json()["results"] == []


def test_a_tenants_own_admin_key_neither_raises_its_budget_nor_touches_the_fleet(
    admin: Api,
) -> None:
    admin.post("tenants/", {"name": "acme"})
    key = key_of(admin, "acme", "admin:write")
    assert key.post("tenants/acme/keys/", {"name": "more"}).status_code == 201
    for method, path, body in WRITES:
        own = any(part in path for part in ("keys", "capture", "erase-text"))
        if not own and path not in ("session/", "tickets/"):
            assert problem(key.call(method, path, body), 403) == "forbidden", path


def test_the_operators_keys_act_for_the_fleet(admin: Api, settings: Any) -> None:
    settings.OPERATOR_TENANT = "operators"
    admin.post("tenants/", {"name": "operators"})
    key = key_of(admin, "operators", "admin:write")
    assert key.post("models/", {"name": "m"}).status_code == 201
    assert key.get("nodes/").status_code == 200
    assert (
        admin.get("events/?type=ModelRegistered").json()["results"][0]["actor"].startswith("key:")
    )


def test_roles_may_write_what_the_policy_says(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    admin.post("models/", {"name": "m"})
    admin.post("models/m/versions/", {**SPEC, "version": "v1"})
    admin.get("tenants/?min_position=3")
    resources = {"tickets": "ticket", "tenants": "tenant", "models": "model", "routes": "route",
                 "nodes": "node", "apply": "catalog", "retention": "retention"}  # fmt: skip
    for role in ("operator", "auditor", "developer", "viewer"):
        person = login(role, role)
        for method, path, body in WRITES[1:]:
            resource = resources[path.partition("/")[0]]
            inner = {"keys": "key", "budgets": "budget", "capture": "text", "erase-text": "text"}
            part = next((part for part in inner if f"/{part}/" in path), "")
            resource = inner.get(part, resource)
            status = person.call(method, f"{path}?dry_run=true", body).status_code
            if path == "tickets/":
                status = person.call(method, path, body).status_code
            may = allowed(Principal("user:x", role), WRITE, resource)
            assert (status != 403) == may, (role, path, status)
        granted = person.post("tenants/acme/keys/", {"name": "x", "scopes": ["admin:write"]})
        assert problem(granted, 403) in ("forbidden", "forbidden_scope")


def test_a_cookie_without_its_csrf_token_writes_nothing(admin: Api) -> None:
    del admin.headers["X-CSRFToken"]
    assert problem(admin.post("tenants/", {"name": "acme"}), 403) == "csrf_failed"
    assert admin.get("status/").status_code == 200


def test_logging_in_and_out(admin: Api) -> None:
    session = admin.get("session/").json()
    assert (session["username"], session["role"], session["tenant_id"]) == ("root", "admin", "")
    again = admin.post("session/", {"username": "root", "password": PASSWORD})
    admin.headers["X-CSRFToken"] = again.json()["csrf_token"]
    assert admin.delete("session/").status_code == 204
    assert problem(admin.get("session/"), 401) == "not_authenticated"


def test_wrong_passwords_are_slowed_down(admin: Api) -> None:
    nobody = Api()
    for _ in range(5):
        answer = nobody.post("session/", {"username": "root", "password": "guess"})
        assert problem(answer, 401) == "invalid_credentials"
    answer = nobody.post("session/", {"username": "root", "password": PASSWORD})
    assert problem(answer, 429) == "too_many_failures" and int(answer["Retry-After"]) > 200
    assert PASSWORD.encode() not in answer.content


def test_a_revoked_key_is_refused_at_once(admin: Api) -> None:
    admin.post("tenants/", {"name": "acme"})
    key = key_of(admin, "acme", "admin:read")
    assert key.get("status/").status_code == 200
    key_id = key.headers["Authorization"].removeprefix("Bearer sk_").partition(".")[0]
    assert admin.delete(f"tenants/acme/keys/{key_id}/").status_code == 200
    assert problem(key.get("status/"), 401) == "invalid_token"
