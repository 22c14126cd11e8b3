"""Signed notes are Go's: its own published example verifies, and ours have not changed."""

from pathlib import Path

import pytest

from controlplane.application.checkpoint import Checkpoint, parse_checkpoint
from controlplane.application.merkle import leaf_hash
from controlplane.application.notes import (
    NoteError,
    Signer,
    join_notes,
    note_hash,
    parse_key,
    parse_keys,
    parse_note,
    sign,
    split_notes,
)

GOLDEN = Path(__file__).parent / "golden"
SIGNER = Signer("engine", bytes(range(32)))
# golang.org/x/mod/sumdb/note, the package's example.
PETER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
SAID = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n\n"
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqd"
    "ngotpRZb6KE6RyyBwJnAM=\n"
)
CHECKPOINT = Checkpoint(
    "engine/events", 2048, leaf_hash(b"r"), 1_700_000_060.25, 1049, "event/1", leaf_hash(b"p"),
    leaf_hash(b"c"),
)  # fmt: skip


def test_against_go() -> None:
    """The example of Go's package verifies with its key, and not if a letter differs."""
    key = parse_key(PETER)
    assert parse_note(SAID).signers([key]) == [key] and key.line == PETER
    with pytest.raises(NoteError, match="wrong"):
        parse_note(SAID.replace("cryptography", "Cryptography")).signers([key])


def test_a_checkpoint_is_written_as_it_always_was() -> None:
    """Keys, text and signature are the golden file's, byte for byte."""
    written = join_notes([sign(CHECKPOINT.text, [SIGNER])])
    assert (
        f"{SIGNER.line}\n{SIGNER.public.line}\n\n{written}"
        == (GOLDEN / "checkpoint.txt").read_text()
    )
    assert parse_checkpoint(parse_note(next(split_notes(written))).text) == CHECKPOINT


def test_a_key_reads_back() -> None:
    assert Signer.parse(SIGNER.line).public == SIGNER.public
    assert parse_keys(f"# ours\n\n{SIGNER.public.line}\n{PETER}\n")[0] == SIGNER.public


@pytest.mark.parametrize(
    "line",
    [
        "",
        "engine",
        PETER.replace("c74f20a3", "c74f20a4"),
        PETER.replace("ARpc", "AXpc"),
        PETER.replace("ARpc", "Arpc"),
        PETER[:-4],
        PETER.replace("Peter", "Pe ter"),
    ],
)
def test_a_damaged_key_is_refused(line: str) -> None:
    with pytest.raises(NoteError):
        parse_key(line)


def test_notes_stand_one_after_the_other() -> None:
    notes = [sign(f"a\n\nb {number}\n", [SIGNER]) for number in range(3)]
    assert list(split_notes(join_notes(notes))) == notes
    assert len({note_hash(note) for note in notes}) == 3


def test_a_stranger_signs_for_nobody() -> None:
    """Another key under the same name is another key."""
    stranger = Signer.generate("engine")
    assert parse_note(sign("x\n", [stranger])).signers([SIGNER.public]) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2048", "02048"),
        ("2048", "-1"),
        ("time 1700000060.250", "time 1700000060.25"),
        ("record event/1", "record event/1 "),
        ("first", "First"),
        ("chain", "chained"),
        ("engine/events\n", "engine/events\r\n"),
    ],
)
def test_a_checkpoint_has_one_form_only(old: str, new: str) -> None:
    with pytest.raises(NoteError):
        parse_checkpoint(CHECKPOINT.text.replace(old, new))
