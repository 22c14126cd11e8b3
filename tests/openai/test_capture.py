"""Text is stored only for who asked for that, only encrypted, and is erased with its key."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.adapters.access import text_keys
from controlplane.adapters.access.models import TextKeyRow
from controlplane.adapters.ledger import texts
from controlplane.adapters.ledger.models import CapturedText, InferenceRequest
from controlplane.application.capture import MAX_PROMPT_BYTES, Capture, Text, TextKey, decrypt
from controlplane.domain import capture, tenant
from controlplane.domain.ids import TenantId
from tests.openai.stack import ROOT, Stack, until

MARKER = "the heron left at four and nobody saw it go"


def manage(stack: Stack, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        env=os.environ | stack.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def holding(stack: Stack, needle: bytes) -> list[Path]:
    """Every file of the data directory that holds it: database, its log, logs, the bus's store."""
    files = [path for path in stack.directory.rglob("*") if path.is_file()]
    assert any(path.name.endswith("-wal") for path in files)
    return [path for path in files if needle in path.read_bytes()]


def order(stack: Stack, name: str, command: capture.CaptureCommand) -> None:
    stack.order(tenant.DECIDER, f"tenant-{name}", command)


def opted_in(stack: Stack, name: str) -> str:
    """A tenant that captures, and its key."""
    key = stack.add_tenant(name)
    order(stack, name, capture.StartCapture(TenantId(name), time.time()))
    return key


def ask(stack: Stack, key: str, endpoint: str = "chat/completions", **body: Any) -> httpx.Response:
    options = {"model": "fast", "max_tokens": 8, **body}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{stack.gateway.url}/v1/{endpoint}", json=options, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def kept(stack: Stack, key: str, **body: Any) -> tuple[str, httpx.Response]:
    """The id of a request whose text was captured; the gateway may be a moment behind the log."""
    found: list[tuple[str, httpx.Response]] = []

    def try_once() -> bool:
        answer = ask(stack, key, **body)
        name = answer.headers["x-engine-request-id"]
        found[:] = [(name, answer)]
        return texts.find(name, None) is not None

    until(try_once, 10)
    return found[0]


def text_of(request_id: str) -> Text:
    stored = texts.find(request_id, None)
    assert stored is not None
    key = text_keys.existing_key(stored.tenant_id, stored.text.generation)
    assert key is not None
    return decrypt(key, stored.tenant_id, request_id, stored.text)


def test_without_opt_in_nothing_of_the_text_is_stored_anywhere(stack: Stack) -> None:
    """Neither of a chat, nor of a stream, nor of completions: the sentence is in no file below the
    data directory, the database's log included."""
    key = stack.add_tenant("silent")
    stack.wait_for("fast", key)
    before = CapturedText.objects.count()
    answer = ask(stack, key, messages=said(MARKER))
    ask(stack, key, messages=said(MARKER), stream=True)
    ask(stack, key, "completions", prompt=[MARKER, MARKER])
    assert holding(stack, MARKER.encode()) == []
    assert CapturedText.objects.count() == before
    record = InferenceRequest.objects.get(request_id=answer.headers["x-engine-request-id"])
    assert record.outcome == "ok" and record.text_hash == ""


def test_with_opt_in_the_text_is_kept_encrypted_and_sealed_by_its_hash(stack: Stack) -> None:
    """What is read with the key is what was asked and answered; no file holds it in the clear."""
    key = opted_in(stack, "open")
    request_id, answer = kept(stack, key, messages=said(MARKER), n=2)
    choices = [one["message"]["content"] for one in answer.json()["choices"]]
    assert text_of(request_id) == Text("chat", [("user", MARKER)], choices, [])
    assert holding(stack, MARKER.encode()) == []
    stored, record = (
        texts.find(request_id, None),
        InferenceRequest.objects.get(request_id=request_id),
    )
    assert stored is not None and stored.text.hash == record.text_hash
    assert texts.find(request_id, "silent") is None
    row = CapturedText.objects.get(request_id=request_id)
    assert (row.tenant_id, row.position) == ("open", record.position)


def test_a_stream_is_kept_whole_and_what_is_long_is_cut_with_a_mark(stack: Stack) -> None:
    """The simulated models take no prompt as long as that, so the cut is made by itself."""
    key = opted_in(stack, "long")
    streamed, _ = kept(stack, key, messages=said("hi"), stream=True)
    assert len("".join(text_of(streamed).answers)) > 0

    long = Capture(TextKey(0, bytes(32)), "chat", [("user", "ä" * MAX_PROMPT_BYTES)])
    long.add(0, "x" * MAX_PROMPT_BYTES)
    long.add(1, "y")
    cut = long.text()
    assert cut.truncated == ["prompt", "answers"]
    assert sum(len(text.encode()) for _, text in cut.prompt) == MAX_PROMPT_BYTES
    assert cut.answers == ["x" * MAX_PROMPT_BYTES]


def test_who_stops_capturing_keeps_what_was_captured_and_adds_nothing(stack: Stack) -> None:
    key = opted_in(stack, "fickle")
    first, _ = kept(stack, key, messages=said("one"))
    order(stack, "fickle", capture.StopCapture(TenantId("fickle"), time.time()))

    def is_over() -> bool:
        answer = ask(stack, key, messages=said("two"))
        return texts.find(answer.headers["x-engine-request-id"], None) is None

    until(is_over, 10)
    assert text_of(first).prompt == [("user", "one")]


def test_erased_text_is_gone_for_good_while_every_seal_holds(stack: Stack) -> None:
    """The wrapped key is in no file any more; log, ledger and texts verify as before; what comes
    later has another key."""
    key = opted_in(stack, "erased")
    request_id, _ = kept(stack, key, messages=said(MARKER))
    manage(stack, "seal")
    assert "intact" in manage(stack, "verify")
    wrapped = bytes(TextKeyRow.objects.get(tenant_id="erased").wrapped)
    assert holding(stack, wrapped) != []

    reason = "asked for by the customer"
    assert manage(stack, "erase_text", "erased", "--reason", reason) == "1 keys destroyed\n"

    stored = texts.find(request_id, None)
    assert stored is not None and text_keys.existing_key("erased", 0) is None
    assert text_keys.key_of("erased", 0, time.time()) is None  # nor is one made in its place
    assert holding(stack, wrapped) == []
    said_by = [one.meta.reason for one in stack.store.read_stream("tenant-erased")]
    assert said_by[-1] == reason
    manage(stack, "seal")
    assert "intact" in manage(stack, "verify")

    def is_new_generation() -> bool:
        later, _ = kept(stack, key, messages=said("later"))
        found = texts.find(later, None)
        return found is not None and found.text.generation == 1

    until(is_new_generation, 10)
    assert "intact" in manage(stack, "verify")


@pytest.mark.parametrize("column", ["nonce", "ciphertext"])
def test_a_changed_text_is_found_without_any_key(stack: Stack, column: str) -> None:
    key = opted_in(stack, f"changed-{column}")
    request_id, _ = kept(stack, key, messages=said("so it was"))
    row = CapturedText.objects.filter(request_id=request_id)
    before = bytes(row.values_list(column, flat=True)[0])
    row.update(**{column: bytes([before[0] ^ 1]) + before[1:]})
    (finding,) = list(texts.text_findings())[:1]
    assert (finding.record_id, finding.check) == (request_id, "text")
    row.update(**{column: before})
    assert list(texts.text_findings()) == []
