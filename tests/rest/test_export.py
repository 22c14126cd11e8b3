"""An export is whole and says so, is safe in a spreadsheet, and shows a tenant only itself."""

import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from controlplane.adapters.export.formats import Export
from controlplane.adapters.ledger.models import Head, InferenceRequest
from tests.rest.conftest import Api, position_of
from tests.rest.test_bad_input import problem


def content(answer: Any) -> bytes:
    assert answer.status_code == 200, answer.content
    return b"".join(answer.streaming_content)


@pytest.fixture
def api(admin: Api) -> Api:
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name, "reason": '=HYPERLINK("http://evil")'})
    return admin


def test_jsonl_holds_every_event_as_the_api_shows_it(api: Api) -> None:
    answer = api.get("exports/audit/")
    lines = [json.loads(line) for line in content(answer).splitlines()]
    assert lines == api.get("events/?limit=1000").json()["results"]
    assert position_of(answer) == 2
    assert answer["Content-Disposition"] == 'attachment; filename="events-0-2.jsonl"'


def test_the_manifest_is_of_exactly_that_file(api: Api) -> None:
    for kind in ("jsonl", "csv"):
        path = f"exports/audit/?format={kind}&after=1&upto=2"
        data = content(api.get(path))
        api.post("tenants/", {"name": f"later-{kind}"})
        manifest = api.get(f"{path}&manifest=true").json()
        assert manifest["sha256"] == hashlib.sha256(data).hexdigest()
        bounds = (manifest["count"], manifest["first_position"], manifest["last_position"])
        assert bounds == (1, 2, 2)


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_a_spreadsheet_runs_nothing_of_a_csv(start: str) -> None:
    record = {"position": 1, "text": f"{start}cmd|' /C calc'!A0", "number": -1.5, "data": {"a": 1}}
    export = Export("csv", ("position", "text", "number", "data"))
    rows = list(csv.reader(io.StringIO(b"".join(export.chunks([record])).decode(), newline="")))
    assert rows[1] == ["1", f"'{record['text']}", "-1.5", '{"a":1}']


def test_reasons_typed_by_people_are_harmless_in_csv_and_unchanged_in_jsonl(api: Api) -> None:
    rows = list(csv.DictReader(io.StringIO(content(api.get("exports/audit/?format=csv")).decode())))
    assert [row["reason"] for row in rows] == ['\'=HYPERLINK("http://evil")'] * 2
    lines = content(api.get("exports/audit/")).splitlines()
    assert json.loads(lines[0])["reason"] == '=HYPERLINK("http://evil")'


def record(number: int, tenant_id: str, outcome: str) -> None:
    InferenceRequest.objects.create(
        request_id=f"req-{number}", tenant_id=tenant_id, subject="key", endpoint="chat",
        requested_model="m", route="", arm="", version_id="m@v1", latency_class="standard",
        num_prompt_tokens=3, max_output_tokens=5, reserved_tokens=8, at=1.0, day="2026-01-01",
        gateway="g", position=number if outcome else None, outcome=outcome, num_output_tokens=4,
        price=150_000_000 if outcome else 0, price_output=600_000,
    )  # fmt: skip
    Head.objects.update_or_create(pk=1, defaults={"position": number})


def test_ended_requests_are_exported_and_listed(api: Api) -> None:
    record(1, "acme", "ok")
    record(2, "globex", "error")
    record(3, "acme", "")
    lines = [
        json.loads(line) for line in content(api.get("exports/audit/?what=requests")).splitlines()
    ]
    assert [(line["request_id"], line["position"]) for line in lines] == [
        ("req-1", 1),
        ("req-2", 2),
    ]
    assert [(line["price"], line["price_output"]) for line in lines] == [("0.00015", "0.6")] * 2
    acme = content(api.get("exports/audit/?what=requests&tenant=acme"))
    assert acme.count(b"\n") == 1 and b"globex" not in acme
    listed = api.get("requests/?limit=2").json()
    assert [one["request_id"] for one in listed["results"]] == ["req-3", "req-2"]
    running = listed["results"][0]
    ends = (running["outcome"], running["num_output_tokens"], running["price"])
    assert ends == ("running", None, None)
    table = content(api.get("exports/audit/?what=requests&format=csv")).decode()
    assert [row["price"] for row in csv.DictReader(io.StringIO(table))] == ["0.00015"] * 2
    rest = api.get(listed["next"].removeprefix("/api/v1/")).json()
    assert [one["request_id"] for one in rest["results"]] == ["req-1"] and rest["next"] is None
    for query, expected in (
        ("outcome=running", ["req-3"]), ("outcome=ok", ["req-1"]), ("tenant=globex", ["req-2"]),
        ("model=m&tenant=acme", ["req-3", "req-1"]), ("request_id=req-2", ["req-2"]),
        ("model=other", []),
    ):  # fmt: skip
        results = api.get(f"requests/?{query}").json()["results"]
        assert [one["request_id"] for one in results] == expected, query
    assert api.get("requests/req-1/").json()["outcome"] == "ok"
    assert problem(api.get("requests/req-9/"), 404) == "request_not_found"


def test_a_budget_shows_what_is_spent_and_held(api: Api) -> None:
    record(1, "acme", "")
    api.put("tenants/acme/budget/", {"tokens": 100, "period": "month"})
    budget = api.get("tenants/acme/budget/?min_position=3").json()
    assert budget == {"tokens": 100, "period": "month", "spent": 0, "reserved": 8, "remaining": 92}


def test_a_range_is_bounded_over_http_and_not_on_the_command_line(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.entrypoints.rest.exporting.MAX_RANGE", 1)
    assert problem(api.get("exports/audit/"), 400) == "range_too_large"
    assert api.get("exports/audit/?after=1").status_code == 200
    call_command("export_audit", "--format", "csv", "--out", str(tmp_path), verbosity=0)
    data = (tmp_path / "events-0-2.csv").read_bytes()
    manifest = json.loads((tmp_path / "events-0-2.manifest.json").read_text())
    assert manifest["sha256"] == hashlib.sha256(data).hexdigest() and manifest["count"] == 2
