"""What the API reference says, and that it is true."""

from typing import Any

import pytest
from drf_spectacular.generators import SchemaGenerator

from controlplane.entrypoints.rest.reference import EXAMPLES, GROUPS, OPERATIONS
from tests.rest.conftest import Api

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


PATHS = {
    "models_register": ("post", "models/"),
    "versions_add": ("post", "models/chat/versions/"),
    "routes_create": ("post", "routes/"),
    "tenants_create": ("post", "tenants/"),
    "keys_issue": ("post", "tenants/demo/keys/"),
    "budgets_set": ("put", "tenants/demo/budgets/all/"),
    "routing_weights_change": ("patch", "routing/weights/"),
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_example_is_accepted_as_it_stands(admin: Api, name: str) -> None:
    admin.post("tenants/", {"name": "demo"})
    if name != "models_register":
        admin.post("models/", {"name": "chat"})
    for version in () if name == "versions_add" else ("v1", "v2"):
        admin.post("models/chat/versions/", {**CHAT, "version": version})
    method, path = PATHS[name]
    for example in EXAMPLES[name]:
        answer = admin.call(method, path, example.value)
        assert answer.status_code in (200, 201) and answer.json()["changed"], answer.content


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
