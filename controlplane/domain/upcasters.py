"""Old shapes of events, lifted one version at a time when read; what is stored never changes.

An upcaster maps ``(type, from_version)`` to a pure function on the decoded JSON object::

    UPCASTERS["RouteCreated", 1] = lambda data: {**data, "sticky": True}   # version 1 -> 2
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]


def _with_engine_options(data: dict[str, Any]) -> dict[str, Any]:
    """Until then nodes did not speculate, whatever ``draft_model`` said."""
    new = {"speculation": "none", "swap_bytes": None, "disaggregation": "none"}
    return {**data, "spec": {**data["spec"], **new}}


def _with_guarantee(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "spec": {**data["spec"], "guaranteed_percent": 0}}


def _with_needs(data: dict[str, Any]) -> dict[str, Any]:
    """Until then a replica needed memory on its devices and nothing else."""
    needs = {"gpu_classes": [], "compute_percent": 0, "cpu_milli": 0, "host_memory": 0}
    return {**data, "spec": {**data["spec"], "needs": needs}}


def _with_interconnect(data: dict[str, Any]) -> dict[str, Any]:
    host = {"cpu_milli": 0, "memory_bytes": 0, "fabric": ""}
    return {**data, "devices": [{**one, "link": ""} for one in data["devices"]], "host": host}


def _with_counts(data: dict[str, Any]) -> dict[str, Any]:
    """Every candidate but those beyond the best 16, and every rejection, was listed; groups of
    devices were neighbours. It was the first planner."""

    def placed(change: dict[str, Any]) -> dict[str, Any]:
        return {**change, "assignment": {**change["assignment"], "shards": [], "replaces": None}}

    inputs = data["inputs"]
    return {
        **data,
        "started": [{**placed(one), **_counts(one)} for one in data["started"]],
        "stopped": [placed(one) for one in data["stopped"]],
        "inputs": inputs and {**inputs, "planner": 1},
    }


def _counts(started: dict[str, Any]) -> dict[str, Any]:
    codes = Counter(one["code"] for one in started["rejections"])
    return {"num_candidates": len(started["candidates"]), "ruled_out": sorted(codes.items())}


def _with_residency(data: dict[str, Any]) -> dict[str, Any]:
    """Until then every replica had its device's memory to itself."""
    return {**data, "spec": {**data["spec"], "residency": "resident"}}


def _with_engine(data: dict[str, Any]) -> dict[str, Any]:
    """There was one engine."""
    return {**data, "spec": {**data["spec"], "engine": "builtin"}}


def _with_engines(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "host": {**data["host"], "engines": ["builtin"]}}


def _with_fabric_address(data: dict[str, Any]) -> dict[str, Any]:
    """Agents ran no group over nodes."""
    return {**data, "host": {**data["host"], "fabric_address": ""}}


def _with_task(data: dict[str, Any]) -> dict[str, Any]:
    """Until then every version generated."""
    return {**data, "spec": {**data["spec"], "task": "generate", "max_inputs": 2048}}


def _with_tiers(data: dict[str, Any]) -> dict[str, Any]:
    def placed(change: dict[str, Any]) -> dict[str, Any]:
        return {**change, "assignment": {**change["assignment"], "tier": "resident"}}

    inputs = data["inputs"]
    new: dict[str, Any] = {"host_bytes": [], "charged_bytes": [], "steady": []}
    return {
        **data,
        "started": [placed(one) for one in data["started"]],
        "stopped": [placed(one) for one in data["stopped"]],
        "inputs": inputs and {**inputs, **new},
    }


def _with_retiers(data: dict[str, Any]) -> dict[str, Any]:
    """Until then a replica kept the tier that it was placed in."""
    inputs = data["inputs"]
    return {**data, "retiered": [], "inputs": inputs and {**inputs, "rates": []}}


def _budget_of_many(data: dict[str, Any]) -> dict[str, Any]:
    """A tenant had one budget, of tokens for all it did; it is called ``default`` now."""
    kept = {name: value for name, value in data.items() if name != "tokens"}
    rule = {"budget_id": "default", "scope": "tenant", "target": "", "unit": "tokens"}
    return {**kept, **rule, "limit": data["tokens"]}


def _key_with_role(data: dict[str, Any]) -> dict[str, Any]:
    """Keys had no role, only scopes; those with an admin scope were administrators."""
    administers = any(scope.startswith("admin:") for scope in data["scopes"])
    return {**data, "role": "admin" if administers else "developer", "models": []}


def _refusal_with_order(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "asked": {}}


def _access_with_roles(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "access": {**data["access"], "roles": []}}


UPCASTERS: dict[tuple[str, int], Upcaster] = {
    ("ApiKeyIssued", 1): _key_with_role,
    ("CommandRefused", 1): _refusal_with_order,
    ("ModelAccessChanged", 1): _access_with_roles,
    ("ModelVersionAdded", 1): _with_engine_options,
    ("ModelVersionAdded", 2): _with_guarantee,
    ("ModelVersionAdded", 3): _with_needs,
    ("ModelVersionAdded", 4): _with_residency,
    ("ModelVersionAdded", 5): _with_engine,
    ("ModelVersionAdded", 6): _with_task,
    ("NodeJoined", 1): _with_interconnect,
    ("NodeJoined", 2): _with_engines,
    ("NodeJoined", 3): _with_fabric_address,
    ("ReplicaBecameReady", 1): lambda data: {**data, "warning": ""},
    ("ReplicaFailed", 1): lambda data: {**data, "retry_s": 0.0, "since": 0.0},
    # Until then nobody kept why a replica waits.
    ("ReplicaStateChanged", 1): lambda data: {**data, "code": "", "detail": ""},
    ("TenantBudgetSet", 1): _budget_of_many,
    # Version 1 did not keep the telemetry that the planner saw.
    ("PlacementDecided", 1): lambda data: {**data, "inputs": None},
    ("PlacementDecided", 2): _with_counts,
    ("PlacementDecided", 3): _with_tiers,
    ("PlacementDecided", 4): _with_retiers,
}


def lift(name: str, version: int, newest: int, data: dict[str, Any]) -> dict[str, Any]:
    """``data`` of schema ``version`` in the shape of ``newest``."""
    for step in range(version, newest):
        data = UPCASTERS[name, step](data)
    return data
