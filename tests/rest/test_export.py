"""An export is whole and says so, is safe in a spreadsheet, and shows a tenant only itself."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane import bootstrap
from controlplane.adapters.export.formats import FORMATS
from controlplane.adapters.ledger.models import Head, InferenceRequest
from controlplane.application.notes import Signer, parse_key
from controlplane.domain.audit import undone_position
from controlplane.verify import verify_export
from tests.rest.conftest import Api, position_of
from tests.rest.test_bad_input import problem


def content(answer: Any) -> bytes:
    assert answer.status_code == 200, answer.content
    return b"".join(answer.streaming_content)


@pytest.fixture
def api(admin: Api) -> Api:
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name, "reason": '=HYPERLINK("http://127.0.0.1:9")'})
    return admin


def test_jsonl_holds_every_event_as_it_is_stored(api: Api) -> None:
    """All that the events page shows, and beside it what the hash chain and the leaf cover."""
    answer = api.get("exports/audit/")
    lines = [json.loads(line) for line in content(answer).splitlines()]
    shown = api.get("events/?limit=1000").json()["results"]
    for line, event in zip(lines, shown, strict=True):
        assert line["data"].pop("type") == event["type"]
        assert undone_position(line["causation_id"]) == event.pop("undoes")
        assert {name: line[name] for name in event} == event
    assert position_of(answer) == 2
    assert answer["Content-Disposition"] == 'attachment; filename="events-0-2.jsonl"'


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_and_its_manifest_verify_offline(api: Api, tmp_path: Path, kind: str) -> None:
    """Downloaded one after the other, with a write in between, and checked with the public key."""
    path, folder = f"exports/audit/?format={kind}&after=1&upto=2", tmp_path / "out"
    folder.mkdir()
    answer = api.get(path)
    (folder / f"events-1-2.{kind}").write_bytes(content(answer))
    api.post("tenants/", {"name": f"later-{kind}"})
    signed = api.get(f"{path}&manifest=true")
    (folder / "manifest.json").write_bytes(signed.content)
    bootstrap.sealer().step(bootstrap.sealed_logs(), now=True)
    (key,) = api.get("checkpoints/keys/").json()["keys"]
    verified = verify_export(folder, [parse_key(key)])
    manifest = signed.json()["manifest"]
    assert verified.manifest.rows == manifest["rows"] == 1
    assert (manifest["first_position"], manifest["last_position"]) == (2, 2)


def test_what_cannot_be_exported_is_said(api: Api) -> None:
    assert problem(api.get("exports/audit/?tenant=nope"), 404) == "tenant_not_found"
    assert problem(api.get("exports/audit/?type=Nonsense"), 400) == "invalid_type"
    assert problem(api.get("exports/audit/?since=yesterday"), 400) == "invalid_number"
    assert problem(api.get("exports/audit/?format=xml"), 400) == "invalid_choice"


def test_filters_by_type_and_time(api: Api) -> None:
    everything = content(api.get("exports/audit/?type=TenantCreated,TenantDeleted&since=1"))
    assert everything.count(b"\n") == 2
    assert content(api.get("exports/audit/?type=TenantDeleted")) == b""
    assert content(api.get("exports/audit/?until=1")) == b""


def test_reasons_typed_by_people_are_harmless_in_csv_and_unchanged_in_jsonl(api: Api) -> None:
    rows = list(csv.DictReader(io.StringIO(content(api.get("exports/audit/?format=csv")).decode())))
    assert [row["reason"] for row in rows] == ['\'=HYPERLINK("http://127.0.0.1:9")'] * 2
    lines = content(api.get("exports/audit/")).splitlines()
    assert json.loads(lines[0])["reason"] == '=HYPERLINK("http://127.0.0.1:9")'
    plain = content(api.get("exports/audit/?format=csv&formula_safe=false"))
    assert b'"=HYPERLINK(' in plain and b"'=" not in plain


def record(number: int, tenant_id: str, outcome: str) -> None:
    InferenceRequest.objects.create(
        request_id=f"req-{number}", tenant_id=tenant_id, subject="key", endpoint="chat",
        requested_model="m", route="", arm="", version_id="m@v1", latency_class="standard",
        num_prompt_tokens=3, max_output_tokens=5, reserved_tokens=8, at=1.0, day="2026-01-01",
        gateway="g", position=number if outcome else None, outcome=outcome, num_output_tokens=4,
        price=150_000_000 if outcome else 0, price_output=600_000,
    )  # fmt: skip
    if outcome:
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
    assert [(line["price"], line["price_output"]) for line in lines] == [(150_000_000, 600_000)] * 2
    acme = content(api.get("exports/audit/?what=requests&tenant=acme"))
    assert acme.count(b"\n") == 1 and b"globex" not in acme
    listed = api.get("requests/?limit=2").json()
    assert [one["request_id"] for one in listed["results"]] == ["req-3", "req-2"]
    running = listed["results"][0]
    ends = (running["outcome"], running["num_output_tokens"], running["price"])
    assert ends == ("running", None, None)
    table = content(api.get("exports/audit/?what=requests&format=csv")).decode()
    assert [row["price"] for row in csv.DictReader(io.StringIO(table))] == ["150000000"] * 2
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


def test_a_range_is_bounded_over_http_and_not_on_the_command_line(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.entrypoints.rest.exporting.MAX_RANGE", 1)
    assert problem(api.get("exports/audit/"), 400) == "range_too_large"
    assert api.get("exports/audit/?after=1").status_code == 200
    out = tmp_path / "out"
    call_command("export_audit", "--format", "csv", "--out", str(out), stdout=io.StringIO())
    verified = verify_export(out, [bootstrap.signer().public])
    assert verified.manifest.rows == 2 == verified.sealed


def test_the_command_refuses_what_does_not_exist(api: Api, tmp_path: Path) -> None:
    for option in ("--tenant=nope", "--type=Nonsense"):
        with pytest.raises(
            CommandError, match=r"There is no (tenant|event type) '?N?n?ope|Nonsense"
        ):
            call_command("export_audit", "--out", str(tmp_path / "out"), option)
    for option in ("--part-rows=0", "--part-rows=-1", "--after=-5", "--upto=-1", "--since=1e400"):
        with pytest.raises(CommandError, match=option.partition("=")[0]):
            call_command("export_audit", "--out", str(tmp_path / "out"), option)
    with pytest.raises(CommandError, match="Give --out a folder"):
        call_command("export_audit", "--out", "")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CommandError, match="no way to ftp"):
        call_command("export_audit", "--out", "ftp://x")


def test_a_machine_with_another_key_signs_no_export(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key has sealed nothing here, so nobody could check its signature."""
    bootstrap.sealer().step(bootstrap.sealed_logs(), now=True)
    monkeypatch.setattr(bootstrap, "signer", lambda: Signer.generate("engine"))
    answer = api.get("exports/audit/")
    assert (answer.status_code, answer.json()["code"]) == (503, "export_unavailable")
