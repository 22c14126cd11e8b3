"""What the API reference says, and that it is true."""

import json
from typing import Any

import pytest
from drf_spectacular.generators import SchemaGenerator

from controlplane.adapters.access import users
from controlplane.entrypoints.rest.examples import EXAMPLES
from controlplane.entrypoints.rest.reference import GROUPS, OPERATIONS
from tests.rest.conftest import Api
from tests.rest.test_nodes import JOINED, report

GIB = 1024**3
CHAT = {"version": "v1", "source": "hf://Qwen/Qwen3-0.6B@main", "gpu_memory": GIB}


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return SchemaGenerator().get_schema(public=True)


def operations(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for path in schema["paths"].values() for one in path.values()]


def test_every_operation_says_in_one_line_what_it_does(schema: dict[str, Any]) -> None:
    """And is in a group; what is told of is there."""
    found = operations(schema)
    assert {one["operationId"] for one in found} == set(OPERATIONS)
    assert [tag["name"] for tag in schema["tags"]] == [name for name, _ in GROUPS]
    for one in found:
        assert one["tags"][0] in dict(GROUPS), one["operationId"]
        assert 5 < len(one["summary"]) < 60 and not one["summary"].endswith(".")
        assert one["description"].endswith("."), one["operationId"]


def test_what_has_a_few_values_lists_them(schema: dict[str, Any]) -> None:
    shapes = schema["components"]["schemas"]

    def values(shape: str, field: str) -> set[str]:
        said = shapes[shape]["properties"][field]
        said = said.get("items", said)
        reference = said.get("$ref") or next(iter(said.get("allOf", ())), {}).get("$ref")
        found = shapes[reference.rsplit("/", 1)[1]] if reference else said
        return set(found["enum"])

    assert values("TenantOrderRequest", "tier") == {"free", "standard", "premium"}
    assert values("KeyOrderRequest", "scopes") >= {"inference", "admin:read"}
    assert values("KeyOrderRequest", "role") == values("AccessOrderRequest", "roles")
    assert values("VersionOrderRequest", "priority") == {"high", "normal", "best-effort"}
    assert values("BudgetOrderRequest", "period") == {"day", "month", "total"}
    assert values("Request", "latency_class") == {"realtime", "standard", "batch"}
    assert "ready" in values("Replica", "state")
    events = schema["paths"]["/api/v1/events/"]["get"]["parameters"]
    order = next(one for one in events if one["name"] == "order")
    assert order["schema"]["enum"] == ["asc", "desc"]


def test_an_unknown_value_is_still_the_domains_to_refuse(admin: Api) -> None:
    refused = admin.post("tenants/", {"name": "acme", "tier": "gold"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_tier")
    typed = admin.post("tenants/", {"name": "acme", "tier": 3})
    assert (typed.status_code, typed.json()["code"]) == (400, "invalid_type")


def test_stickiness_is_on_unless_switched_off_and_said_to_be(
    schema: dict[str, Any], admin: Api
) -> None:
    field = schema["components"]["schemas"]["RouteOrderRequest"]["properties"]["sticky"]
    assert field["default"] is True and "same user gets the same arm" in field["description"]
    assert "Sticky by default" in OPERATIONS["routes_create"].description


# What must be before an example changes anything: (method, path, body) after the world is there.
BEFORE: dict[str, list[tuple[str, str, Any]]] = {
    "tenants_resume": [("post", "tenants/acme/suspend/", {})],
    "keys_resume": [("post", "tenants/acme/keys/KEY/suspend/", {})],
    "nodes_undrain": [("post", "nodes/n1/drain/", {})],
    "budgets_reset": [("put", "tenants/acme/budgets/all/", {"limit": "5"})],
    "tenants_erase_text": [("put", "tenants/acme/capture/", {"captures_text": True})],
    "routes_change": [("post", "routes/", {"name": "chat-route", "arms": [
        {"name": "a", "version_id": "chat@v1", "weight": 1}]})],
    "versions_make_default": [("post", "models/chat/versions/v2/default/", {})],
    "versions_retire": [("post", "models/chat/versions/v2/default/", {})],
    "budgets_set": [("post", "models/", {"name": "smollm2"})],
}  # fmt: skip


def world(admin: Api, name: str) -> str:
    """A tenant with a key, a model of two versions and a node, less what ``name`` makes; the key's
    id."""
    users.save_user("ann", "correct horse battery", "viewer", "")
    report(JOINED)
    if name != "models_register":
        admin.post("models/", {"name": "chat"})
    if name not in ("models_register", "versions_add"):
        for version in ("v1", "v2"):
            admin.post("models/chat/versions/", {**CHAT, "version": version})
    if name in ("tenants_create", "catalog_apply"):
        return ""
    admin.post("tenants/", {"name": "acme"})
    return str(admin.post("tenants/acme/keys/", {"name": "ci"}).json()["key_id"])


def address(schema: dict[str, Any], name: str, key_id: str, head: int) -> tuple[str, str]:
    """Method and path of an operation in the world above; an event is its last one."""
    path, method = next(
        (path, method)
        for path, found in schema["paths"].items()
        for method, one in found.items()
        if one["operationId"] == name
    )
    values = {
        "name": "chat-route" if name.startswith("routes") else "chat", "version": "v1",
        "tenant_id": "acme", "budget_id": "all", "node_id": "n1", "kind": "requests",
        "key_id": key_id, "position": head,
    }  # fmt: skip
    return method, path.removeprefix("/api/v1/").format(**values)


def test_whatever_takes_a_body_has_an_example_of_it(schema: dict[str, Any]) -> None:
    for one in operations(schema):
        for media_type, body in one.get("requestBody", {}).get("content", {}).items():
            assert body.get("examples"), (one["operationId"], media_type)


def test_no_description_repeats_the_values_that_stand_beside_it(schema: dict[str, Any]) -> None:
    assert "* `" not in json.dumps(schema["components"])


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_is_accepted_as_it_stands(
    admin: Api, schema: dict[str, Any], name: str
) -> None:
    key_id = world(admin, name)
    for before_method, before_path, body in BEFORE.get(name, ()):
        made = admin.call(before_method, before_path.replace("KEY", key_id), body)
        assert made.status_code in (200, 201), made.content
    head = admin.get("status/").json()["head"]
    admin.get(f"tenants/?min_position={head}")
    method, path = address(schema, name, key_id, head)
    for example in EXAMPLES[name]:
        body = example.value
        sent = {"raw": body, "content_type": example.media_type} if isinstance(body, str) else {}
        answer = admin.call(method, path, None if sent else body, **sent)
        assert answer.status_code in (200, 201), answer.content
        assert answer.json().get("changed", True), answer.content


@pytest.mark.parametrize(
    ("said", "expected"),
    [(GIB, GIB), ("1.5GiB", GIB * 3 // 2), ("2 GB", 2 * 10**9), ("512MiB", 512 * 1024**2)],
)
def test_memory_is_bytes_or_a_size_as_in_the_yaml(admin: Api, said: Any, expected: int) -> None:
    admin.post("models/", {"name": "chat"})
    body = {**CHAT, "gpu_memory": said, "swap_bytes": None, "needs": {"host_memory": "1KiB"}}
    done = admin.post("models/chat/versions/", body)
    assert done.status_code == 201, done.content
    spec = done.json()["events"][0]["data"]["spec"]
    assert spec["gpu_memory"] == expected and spec["needs"]["host_memory"] == 1024


@pytest.mark.parametrize("nonsense", ["lots", "1.5", "GiB", "-1GiB", "1.5 gib", "", "1e9"])
def test_nonsense_for_memory_is_refused_with_what_it_should_be(admin: Api, nonsense: str) -> None:
    admin.post("models/", {"name": "chat"})
    refused = admin.post("models/chat/versions/", {**CHAT, "gpu_memory": nonsense})
    problem = refused.json()
    assert (refused.status_code, problem["code"]) == (400, "invalid_size")
    assert problem["errors"][0]["pointer"] == "/gpu_memory" and "16GiB" in problem["detail"]


@pytest.mark.parametrize("value", [1.5, True, None, ["1GiB"]])
def test_what_is_neither_number_nor_text_is_no_memory(admin: Api, value: Any) -> None:
    admin.post("models/", {"name": "chat"})
    refused = admin.post("models/chat/versions/", {**CHAT, "gpu_memory": value})
    assert refused.status_code == 400 and refused.json()["errors"][0]["pointer"] == "/gpu_memory"
