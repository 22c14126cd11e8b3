"""Checkpoints and proofs over the API: anyone can recompute them, and only of what he may see."""

import time
from hashlib import sha256
from typing import Any

import pytest

from controlplane import bootstrap
from controlplane.application.merkle import leaf_hash, proves_consistency, proves_inclusion
from controlplane.application.notes import parse_key, parse_note
from tests.proof.filling import fill_ledger
from tests.rest.conftest import Api
from tests.rest.test_bad_input import problem


def seal() -> None:
    bootstrap.sealer().step(bootstrap.sealed_logs(), now=True)


@pytest.fixture
def api(admin: Api) -> Api:
    """Twice sealed: after 2 events, and after 5 with 10 requests."""
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name})
    seal()
    for name in ("initech", "umbrella", "hooli"):
        admin.post("tenants/", {"name": name})
    fill_ledger(10)
    seal()
    return admin


def test_checkpoints_are_listed_and_signed(api: Api) -> None:
    """Both logs or one, upwards or downwards, each a note that the published key verifies."""
    (key,) = api.get("checkpoints/keys/").json()["keys"]
    every = api.get("checkpoints/").json()["results"]
    assert [(one["log"], one["size"]) for one in every] == [
        ("events", 2), ("events", 5), ("requests", 10),
    ]  # fmt: skip
    for one in every:
        note = parse_note(one["note"])
        assert note.signers([parse_key(key)]) and one["root"] and str(one["size"]) in note.text
    newest = api.get("checkpoints/?log=events&order=desc&limit=1").json()
    assert [one["size"] for one in newest["results"]] == [5]
    older = api.get(newest["next"].removeprefix("/api/v1/")).json()["results"]
    assert [one["size"] for one in older] == [2]


def test_two_checkpoints_of_one_size_are_on_one_page(api: Api, admin: Api) -> None:
    for number in range(5):
        admin.post("tenants/", {"name": f"more-{number}"})
    seal()
    page, listed = api.get("checkpoints/?limit=1").json(), []
    while page["results"]:
        listed += [(one["log"], one["size"]) for one in page["results"]]
        page = api.get(page["next"].removeprefix("/api/v1/")).json()
    assert listed == [("events", 2), ("events", 5), ("events", 10), ("requests", 10)]


def included(answer: Any) -> bool:
    proof = answer.json()
    leaf = leaf_hash(proof["record"].encode())
    path = [bytes.fromhex(one) for one in proof["path"]]
    root = bytes.fromhex(proof["root"])
    assert leaf.hex() == proof["leaf"]
    assert proof["checkpoint"] is None or proof["checkpoint"]["root"] == proof["root"]
    return proves_inclusion(leaf, proof["position"] - 1, proof["size"], path, root)


def test_any_record_is_proved_to_lie_under_a_checkpoint(api: Api) -> None:
    """From the record's own bytes, with nothing but SHA-256, to a root that is signed."""
    for position in range(1, 6):
        assert included(api.get(f"checkpoints/inclusion/?position={position}"))
    assert included(api.get("checkpoints/inclusion/?position=2&size=2"))
    request = api.get("checkpoints/inclusion/?log=requests&request_id=req-000003")
    assert included(request) and "req-000003" in request.json()["record"]


def test_an_older_checkpoint_is_the_beginning_of_a_newer_one(api: Api) -> None:
    proof = api.get("checkpoints/consistency/?first=2").json()
    roots = [bytes.fromhex(proof[name]) for name in ("first_root", "second_root")]
    path = [bytes.fromhex(one) for one in proof["path"]]
    assert proves_consistency(2, 5, path, *roots)
    sealed = {
        one["size"]: one["root"] for one in api.get("checkpoints/?log=events").json()["results"]
    }
    assert [one.hex() for one in roots] == [sealed[2], sealed[5]]


def test_what_has_no_proof_is_said(api: Api) -> None:
    for query, code in (
        ("inclusion/?position=6", "not_sealed"),
        ("inclusion/?position=0", "not_sealed"),
        ("inclusion/?position=1&size=6", "invalid_size"),
        ("inclusion/", "required"),
        ("inclusion/?position=-1", "invalid_cursor"),
        ("inclusion/?log=other&position=1", "invalid_choice"),
        ("inclusion/?request_id=req-000001", "not_sealed"),
        ("consistency/?first=6", "invalid_size"),
        ("consistency/?first=5&second=2", "invalid_size"),
        ("consistency/?first=0", "invalid_size"),
        ("keys/?x=1", "unknown_filter"),
    ):
        assert problem(api.get(f"checkpoints/{query}"), 400) == code, query
    absent = api.get("checkpoints/inclusion/?log=requests&request_id=req-9")
    assert problem(absent, 404) == "request_not_found"


def test_a_tenant_gets_proofs_of_its_own_records_alone(api: Api) -> None:
    """A foreign record does not exist for it, by position and by id alike."""
    issued = api.post("tenants/acme/keys/", {"name": "k", "scopes": ["admin:read"]}).json()
    seal()
    acme = Api(issued["secret"])
    assert included(acme.get("checkpoints/inclusion/?position=1"))
    assert problem(acme.get("checkpoints/inclusion/?position=2"), 404) == "record_not_found"
    foreign = acme.get("checkpoints/inclusion/?log=requests&position=1")
    assert problem(foreign, 404) == "record_not_found"
    assert acme.get("checkpoints/").status_code == 200
    assert problem(acme.get("verification/"), 403) == "forbidden"


def test_a_verification_runs_beside_the_server_and_its_result_is_kept(api: Api) -> None:
    assert api.get("verification/").json()["at"] is None
    started = api.post("verification/", {})
    assert started.status_code == 202
    deadline = time.monotonic() + 20
    while (result := api.get("verification/").json())["running"] or result["at"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert result["intact"] and result["finding"] is None and result["actor"] == "user:root"
    assert [(one["log"], one["sealed"]) for one in result["logs"]] == [
        ("events", 5),
        ("requests", 10),
    ]
    assert sha256().hexdigest() not in [one["root"] for one in result["logs"]]
