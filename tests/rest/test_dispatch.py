"""Why a request went where it went, over REST and on the command line."""

import io
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from msgspec.structs import replace

from controlplane.adapters.ledger.models import Dispatch
from controlplane.dispatch.record import FORMULA, decode, encode
from tests.rest.conftest import Api, key_of
from tests.rest.test_bad_input import problem
from tests.rest.test_usage import history

GOLDEN = decode(
    (Path(__file__).parents[1] / "dispatch" / "golden" / f"dispatch_{FORMULA}.json").read_bytes()
)


def keep(number: int, **changes: object) -> None:
    data = encode(replace(GOLDEN, **changes)).decode()
    Dispatch.objects.create(request_id=f"req-{number}", position=number, data=data)


def recomputed(*arguments: str) -> str:
    out = io.StringIO()
    call_command("recompute_dispatch", *arguments, stdout=out)
    return out.getvalue()


def test_every_replica_is_shown_with_its_terms_or_the_rule_that_lost_it(admin: Api) -> None:
    history()
    keep(1, attempt=3, why="sampled")
    keep(1)
    body = admin.get("requests/req-1/dispatch/").json()
    assert (body["outcome"], body["share"], body["is_sampled"], body["is_whole"]) == (
        "ok", 0.01, False, True,
    )  # fmt: skip
    first, second = body["dispatches"]
    assert (first["attempt"], second["attempt"]) == (2, 3)
    assert (first["why"], first["position"], first["weights"]["gamma"]) == ("followed", 812, 2.0)
    shown = {one["replica_id"] for one in first["candidates"] + first["rejected"]}
    assert shown == {one["replica_id"] for one in first["replicas"]} and len(shown) == 5
    for one in first["candidates"]:
        terms = one["terms"]
        assert one["cost"] == terms["latency"] + terms["utilization"] + terms["loading"]
    assert {one["code"] for one in first["rejected"]} == {"too_hot", "node_draining"}
    assert first["sentences"][0].startswith("Kept because this attempt follows one")
    assert first["sentences"][1].startswith(f"{first['replica_id']} on {first['node_id']} was the")
    assert len(first["sentences"]) == 6 and len(second["sentences"]) == 5
    assert first["recomputed"] == {"equal": True, "comparable": True, "differences": []}


def test_a_request_that_was_not_sampled_says_so(admin: Api) -> None:
    history()
    body = admin.get("requests/req-1/dispatch/").json()
    assert (body["dispatches"], body["share"], body["is_sampled"]) == ([], 0.01, False)
    assert problem(admin.get("requests/req-9/dispatch/"), 404) == "request_not_found"
    assert problem(admin.get("requests/req-1/dispatch/?as_of=soon"), 400) == "invalid_as_of"


def test_a_tenant_sees_its_own_request_without_the_load_of_others(admin: Api) -> None:
    """What other replicas did is other tenants' load, and their nodes are not its to know."""
    for name in ("acme", "globex"):
        admin.post("tenants/", {"name": name})
    history()
    keep(1)
    keep(4)
    mine = key_of(admin, "acme", "admin:read")
    assert problem(mine.get("requests/req-4/dispatch/"), 404) == "request_not_found"
    body = mine.get("requests/req-1/dispatch/").json()
    (one,) = body["dispatches"]
    assert not body["is_whole"] and (one["num_candidates"], one["num_rejected"]) == (3, 2)
    assert [each["replica_id"] for each in one["candidates"]] == [one["replica_id"]]
    assert [each["replica_id"] for each in one["replicas"]] == [one["replica_id"]]
    assert one["rejected"] == [] and len(one["sentences"]) == 2
    assert "node-4" not in mine.get("requests/req-1/dispatch/").content.decode()


def test_a_choice_is_made_again_on_the_command_line(admin: Api) -> None:
    history()
    keep(1)
    keep(2)
    assert recomputed("req-1") == (
        f"req-1 (choice 0, attempt 2, {GOLDEN.outcome.replica_id}): equal, bit for bit\n"
    )
    assert recomputed("--all") == "2 equal, 0 different, 0 not comparable\n"
    with pytest.raises(CommandError, match="was not kept"):
        recomputed("req-3")
    with pytest.raises(CommandError, match="no request 'req-9'"):
        recomputed("req-9")
    with pytest.raises(CommandError, match="Name a request"):
        recomputed()


def test_a_record_that_was_changed_is_named(admin: Api) -> None:
    """Over REST and by the command, which fails; one of another formula proves nothing."""
    history()
    best = replace(GOLDEN.outcome.candidates[0], cost=0.5)
    outcome = replace(GOLDEN.outcome, candidates=(best, *GOLDEN.outcome.candidates[1:]))
    keep(1, outcome=outcome)
    (one,) = admin.get("requests/req-1/dispatch/").json()["dispatches"]
    (found,) = one["recomputed"]["differences"]
    assert (found["path"], found["stored"]) == ("outcome.candidates[0].cost", 0.5)
    with pytest.raises(CommandError, match="chooses otherwise, or the record was changed"):
        recomputed("req-1")
    Dispatch.objects.all().delete()
    keep(1, outcome=outcome, formula=FORMULA + 1)
    assert "formula 2 made it" in recomputed("req-1")
    assert recomputed("--all").endswith("0 equal, 0 different, 1 not comparable\n")
