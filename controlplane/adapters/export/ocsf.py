"""OCSF 1.6.0, class API Activity (6003), a line of JSON each: what a SIEM takes in.

The version is pinned, since attributes move between 1.6, 1.7 and 1.9. ``raw_data`` holds the
canonical row, from which a verifier maps the line anew and compares. Worked example::

    TenantCreated by user:ada      activity_id 1 (Create), type_uid 600301, api.operation
                                   "TenantCreated", resources [tenant-acme]
    CommandRefused                 status_id 2 (Failure), status_detail its code
    an inference request           activity_id 99 (Other: "Inference"), type_uid 600399

``type_uid`` is ``class_uid * 100 + activity_id``; ``time`` is in milliseconds.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from controlplane.adapters.export.jsonl import Jsonl
from controlplane.application.exports import POSITION, Row, row_fields
from controlplane.application.records import EVENTS, record_id

VERSION = "1.6.0"
CLASS_UID = 6003
CREATE, READ, UPDATE, DELETE, OTHER = 1, 2, 3, 4, 99
_ACTIVITIES = {CREATE: "Create", READ: "Read", UPDATE: "Update", DELETE: "Delete"}
_WORDS = (
    (CREATE, re.compile(r"(Created|Added|Registered|Issued|Joined)$")),
    (DELETE, re.compile(r"(Deleted|Removed|Revoked|Retired)$")),
)
_OK, _FAILED, _UNKNOWN = 1, 2, 0
_STATUSES = {_OK: "Success", _FAILED: "Failure", _UNKNOWN: "Unknown"}

_encode = msgspec.json.Encoder(order="sorted").encode


class _Line(msgspec.Struct):
    raw_data: str


class Ocsf:
    name = "ocsf"
    content_type = "application/x-ndjson"

    def __init__(self, log: str) -> None:
        self._log, self._raw = log, Jsonl(log)
        self._names = [name for name, _ in row_fields(log)]

    def start(self) -> bytes:
        return b""

    def rows(self, rows: Sequence[Row]) -> bytes:
        return b"".join(self._line(row, self._raw.rows([row]).decode()) for row in rows)

    def end(self) -> bytes:
        return b""

    def read(self, content: BinaryIO) -> Iterator[Row]:
        """From ``raw_data``; raises ValueError for a line that is not what it maps to."""
        row_of = self._raw.reader()
        for line in content:
            try:
                raw = msgspec.json.decode(line, type=_Line).raw_data
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise ValueError(str(error)) from error
            row = row_of(raw.encode())
            if self._line(row, raw) != line:
                raise ValueError("its attributes are not those of its raw_data")
            yield row

    def _line(self, row: Row, raw: str) -> bytes:
        values = dict(zip(self._names, row, strict=True))
        own = _event(values) if self._log == EVENTS else _request(values)
        return _encode({**own, **_common(self._log, row, own), "raw_data": raw}) + b"\n"


def _common(log: str, row: Row, own: dict[str, Any]) -> dict[str, Any]:
    activity = own["activity_id"]
    return {
        "category_uid": 6,
        "category_name": "Application Activity",
        "class_uid": CLASS_UID,
        "class_name": "API Activity",
        "type_uid": CLASS_UID * 100 + activity,
        "severity_id": 1,
        "severity": "Informational",
        "status": _STATUSES[own["status_id"]],
        "metadata": {
            "version": VERSION,
            "uid": record_id(log, row[POSITION:]),
            "sequence": row[POSITION],
            "log_name": log,
            "product": {"name": "engine", "vendor_name": "engine"},
            "original_time": str(own["time"]),
        },
    }


def _event(values: dict[str, Any]) -> dict[str, Any]:
    kind, data = values["type"], msgspec.json.decode(values["data"])
    refused = kind == "CommandRefused"
    activity = UPDATE if not refused else OTHER
    for number, words in _WORDS:
        activity = number if words.search(kind) else activity
    return {
        "activity_id": activity,
        "activity_name": _ACTIVITIES.get(activity, "Refused"),
        "time": int(values["recorded_at"] * 1000),
        "status_id": _FAILED if refused else _OK,
        **({"status_detail": str(data.get("code", ""))} if refused else {}),
        "message": values["reason"],
        "actor": {"user": {"uid": values["actor"], "name": values["actor"]}},
        "api": {"operation": kind, "request": {"uid": values["correlation_id"]}},
        "src_endpoint": _endpoint(values["address"]),
        "resources": [{"uid": values["stream"], "type": values["stream"].partition("-")[0]}],
        "unmapped": {"data": data, "causation_id": values["causation_id"]},
    }


def _request(values: dict[str, Any]) -> dict[str, Any]:
    outcome = values["outcome"]
    return {
        "activity_id": OTHER,
        "activity_name": "Inference",
        "time": int((values["ended_at"] or 0.0) * 1000),
        "start_time": int(values["at"] * 1000),
        "duration": int(values["duration_ms"] or 0),
        "status_id": _OK if outcome == "ok" else _UNKNOWN if outcome == "unknown" else _FAILED,
        "status_detail": values["error_code"] or outcome,
        "actor": {
            "user": {
                "uid": values["subject"],
                "name": values["subject"],
                "org": {"uid": values["tenant_id"]},
            }
        },
        "api": {"operation": values["endpoint"], "request": {"uid": values["request_id"]}},
        "src_endpoint": {"svc_name": values["gateway"]},
        "resources": [{"uid": values["version_id"], "type": "model"}],
    }


def _endpoint(address: str) -> dict[str, str]:
    """A caller's address; ours have none, and then the process is named."""
    return {"ip": address} if address else {"svc_name": "controlplane"}
