"""A line of OCSF is what a SIEM that knows API Activity 6003 of version 1.6.0 expects."""

import io
import json
from typing import Any

import pytest

from controlplane.adapters.export.ocsf import Ocsf
from controlplane.application.exports import RowMaker
from controlplane.application.records import EVENTS, FIELDS, NEWEST, REQUESTS

# What the schema of 1.6.0 calls required for this class, without profiles.
REQUIRED = {
    "activity_id", "actor", "api", "category_uid", "class_uid", "metadata", "severity_id",
    "src_endpoint", "time", "type_uid",
}  # fmt: skip


def event(kind: str, data: bytes = b"{}", address: str = "10.0.0.1") -> tuple[Any, ...]:
    at = 1_700_000_000.5
    meta = ("user:ada", "req-1", "", address, "because")
    return (7, "tenant-acme", 3, kind, 1, data, *meta, at)


def request(**changes: Any) -> tuple[Any, ...]:
    empty = {"int": 0, "float": 0.0, "float?": None, "text": ""}
    values: dict[str, Any] = {name: empty[kind] for name, kind in FIELDS[NEWEST[REQUESTS]]}
    texts = {
        "request_id": "req-9", "tenant_id": "acme", "subject": "key-1", "endpoint": "chat",
        "version_id": "m@v1", "outcome": "ok", "gateway": "gw-1", "at": 1_700_000_000.0,
        "ended_at": 1_700_000_002.25, "duration_ms": 2250.0, "error_code": "",
    }  # fmt: skip
    return tuple({**values, **texts, **changes}.values())


def mapped(log: str, columns: tuple[Any, ...]) -> dict[str, Any]:
    row = RowMaker(log).row(1, NEWEST[log], columns, None)
    line: dict[str, Any] = json.loads(Ocsf(log).rows([row]))
    assert line.keys() >= REQUIRED and line["class_uid"] == 6003 and line["category_uid"] == 6
    assert line["type_uid"] == 6003 * 100 + line["activity_id"]
    assert line["metadata"]["version"] == "1.6.0" and line["metadata"]["product"]["name"]
    return line


@pytest.mark.parametrize(
    ("kind", "activity"),
    [
        ("TenantCreated", 1),
        ("ApiKeyIssued", 1),
        ("TenantTierChanged", 3),
        ("TenantDeleted", 4),
        ("ApiKeyRevoked", 4),
        ("CommandRefused", 99),
    ],
)
def test_events_are_activities(kind: str, activity: int) -> None:
    line = mapped(EVENTS, event(kind))
    assert line["activity_id"] == activity
    assert line["time"] == 1_700_000_000_500 and line["metadata"]["uid"] == "tenant-acme:3"
    assert line["actor"]["user"]["uid"] == "user:ada" and line["api"]["operation"] == kind
    assert line["src_endpoint"] == {"ip": "10.0.0.1"}
    assert line["resources"] == [{"uid": "tenant-acme", "type": "tenant"}]


def test_a_refusal_is_a_failure_with_its_code() -> None:
    line = mapped(EVENTS, event("CommandRefused", b'{"code":"invalid_name"}', address=""))
    assert (line["status_id"], line["status_detail"]) == (2, "invalid_name")
    assert line["src_endpoint"] == {"svc_name": "controlplane"}


@pytest.mark.parametrize(("outcome", "status"), [("ok", 1), ("error", 2), ("unknown", 0)])
def test_requests_are_inference(outcome: str, status: int) -> None:
    line = mapped(REQUESTS, request(outcome=outcome))
    assert (line["activity_id"], line["activity_name"]) == (99, "Inference")
    assert line["status_id"] == status and line["duration"] == 2250
    assert line["actor"]["user"]["org"] == {"uid": "acme"}
    assert line["resources"] == [{"uid": "m@v1", "type": "model"}]


def test_a_line_that_says_something_else_than_its_raw_data_is_not_read() -> None:
    form = Ocsf(EVENTS)
    row = RowMaker(EVENTS).row(1, "event/1", event("TenantCreated"), None)
    good = form.rows([row])
    assert list(form.read(io.BytesIO(good))) == [row]
    with pytest.raises(ValueError, match="not those of its raw_data"):
        list(form.read(io.BytesIO(good.replace(b'"status_id":1', b'"status_id":2'))))
