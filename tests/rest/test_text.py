"""Captured text over REST: asked for, read on record, erased with its key."""

import time
from typing import Any

import pytest

from controlplane import bootstrap
from controlplane.adapters.access import text_keys
from controlplane.adapters.ledger.models import CapturedText, InferenceRequest
from controlplane.application.capture import Text, encrypt
from controlplane.domain.policy import GENERAL_SCOPES, Principal, allowed, may_grant
from tests.rest.conftest import Api, login
from tests.rest.test_bad_input import problem

SAID = Text("chat", [("user", "Where is the heron?")], ["It left."], [])
REASON = {"reason": "ticket 4711"}


def captured(tenant_id: str, request_id: str) -> None:
    """As a gateway would have left it."""
    generation = bootstrap.command_handler().state(*_stream(tenant_id))[1].capture.generation
    key = text_keys.key_of(tenant_id, generation, time.time())
    assert key is not None
    text = encrypt(key, tenant_id, request_id, SAID)
    InferenceRequest.objects.create(
        request_id=request_id, tenant_id=tenant_id, subject="k", endpoint="chat",
        requested_model="m", route="", arm="", version_id="m@v1", latency_class="standard",
        num_prompt_tokens=3, max_output_tokens=5, reserved_tokens=8, at=time.time(), day="d",
        gateway="g", text_hash=text.hash,
    )  # fmt: skip
    CapturedText.objects.create(
        request_id=request_id, tenant_id=tenant_id, position=1, generation=generation,
        nonce=text.nonce, ciphertext=text.ciphertext, at=time.time(),
    )  # fmt: skip


def _stream(tenant_id: str) -> tuple[Any, str]:
    from controlplane.domain import tenant

    return tenant.DECIDER, tenant.DECIDER.stream(tenant_id)


@pytest.fixture
def acme(admin: Api) -> Api:
    """The administrator, with a tenant that captures and one that does not."""
    for name in ("acme", "other"):
        assert admin.post("tenants/", {"name": name}).status_code == 201
    assert admin.put("tenants/acme/capture/", {"captures_text": True}).status_code == 200
    return admin


def test_capture_is_off_until_it_is_asked_for(admin: Api) -> None:
    made = admin.post("tenants/", {"name": "acme"})
    after = f"?min_position={made['X-Log-Position']}"
    assert admin.get(f"tenants/acme/{after}").json()["captures_text"] is False
    order = {"captures_text": True, "reason": "to look into answers"}
    tried = admin.put("tenants/acme/capture/?dry_run=true", order)
    assert tried.json()["events"][0]["type"] == "TenantCaptureStarted"
    stale = admin.put("tenants/acme/capture/", order, headers={"If-Match": '"9"'})
    assert stale.status_code == 412
    done = admin.put("tenants/acme/capture/", order)
    assert done.json()["changed"] is True
    after = f"?min_position={done['X-Log-Position']}"
    assert admin.get(f"tenants/acme/{after}").json()["captures_text"] is True
    assert admin.put("tenants/acme/capture/", order).json()["changed"] is False


def test_each_reading_is_on_record_before_the_text_is_given(acme: Api) -> None:
    captured("acme", "req-1")
    answer = acme.get("requests/req-1/text/", headers={"X-Reason": "complaint 12"})
    assert answer.status_code == 200
    assert answer.json() == {
        "request_id": "req-1",
        "tenant_id": "acme",
        "endpoint": "chat",
        "prompt": [{"role": "user", "text": "Where is the heron?"}],
        "answers": ["It left."],
        "truncated": [],
    }
    position = bootstrap.event_store().head().position
    entry = acme.get(f"audit/?action=TextRead&min_position={position}").json()["results"][0]
    assert (entry["target"], entry["reason"]) == ("tenant-acme", "complaint 12")
    assert entry["after"] == {"request req-1": {"text": "read"}} and "heron" not in str(entry)


def test_nobody_reads_text_by_a_scope_or_role_that_is_for_something_else(acme: Api) -> None:
    """Only an administrator, and with a key only one that was issued for that."""
    captured("acme", "req-1")
    for role in ("operator", "auditor", "developer", "viewer"):
        answer = login(f"a-{role}", role).get("requests/req-1/text/")
        assert problem(answer, 403) == "forbidden"
    body = {"name": "x", "role": "admin", "scopes": list(GENERAL_SCOPES)}
    general = Api(acme.post("tenants/acme/keys/", body).json()["secret"])
    assert problem(general.get("requests/req-1/text/"), 403) == "forbidden"
    special = {**body, "scopes": ["text:read"]}
    assert problem(general.post("tenants/acme/keys/", special), 403) == "forbidden_scope"
    reader = Api(acme.post("tenants/acme/keys/", special).json()["secret"])
    assert reader.get("requests/req-1/text/").status_code == 200
    assert problem(reader.get("requests/"), 403) == "forbidden"


def test_another_tenants_text_is_as_absent_as_none_at_all(acme: Api) -> None:
    captured("acme", "req-1")
    stranger = login("stan", "admin", "other")
    foreign = stranger.get("requests/req-1/text/")
    absent = stranger.get("requests/req-2/text/")
    assert (foreign.status_code, absent.status_code) == (404, 404)
    assert foreign.json()["code"] == absent.json()["code"] == "text_not_found"
    for path, body in (
        ("tenants/acme/erase-text/", REASON),
        ("tenants/acme/capture/", {"captures_text": False}),
    ):
        call = stranger.post if "erase" in path else stranger.put
        assert problem(call(path, body), 404) == "tenant_not_found"
    assert login("ann", "admin", "acme").get("requests/req-1/text/").status_code == 200


def test_erased_text_is_gone_and_what_comes_later_has_another_key(acme: Api) -> None:
    captured("acme", "req-1")
    assert problem(acme.post("tenants/acme/erase-text/", {}), 400)
    tried = acme.post("tenants/acme/erase-text/?dry_run=true", REASON)
    assert tried.json()["changed"] is True
    assert acme.get("requests/req-1/text/").status_code == 200
    done = acme.post("tenants/acme/erase-text/", REASON)
    assert done.json()["events"][0]["data"]["generation"] == 0
    assert problem(acme.get("requests/req-1/text/"), 410) == "text_erased"
    captured("acme", "req-2")
    assert acme.get("requests/req-2/text/").status_code == 200
    assert problem(acme.get("requests/req-1/text/"), 410) == "text_erased"
    erased = int(done["X-Log-Position"])
    assert problem(acme.post(f"events/{erased}/undo/", {}), 409) == "not_undoable"


def test_a_text_that_was_swapped_for_anothers_is_not_shown(acme: Api) -> None:
    """Tenant and request are part of what is authenticated."""
    captured("acme", "req-1")
    captured("acme", "req-2")
    first, second = CapturedText.objects.order_by("request_id")
    CapturedText.objects.filter(pk=first.pk).update(
        nonce=second.nonce, ciphertext=second.ciphertext
    )
    assert problem(acme.get("requests/req-1/text/"), 409) == "text_damaged"


def test_nobody_hands_out_the_right_to_read_who_has_it_not() -> None:
    general = Principal("key:1", "admin", "", GENERAL_SCOPES)
    assert may_grant(general, "admin", GENERAL_SCOPES)
    assert not may_grant(general, "admin", ("text:read",))
    assert not allowed(general, "read", "text") and allowed(general, "write", "text")
