"""A record's canonical bytes never change, and hold every column that is stored."""

from pathlib import Path

import pytest

from controlplane.adapters.eventstore.models import Event
from controlplane.adapters.ledger.models import Attempt, InferenceRequest
from controlplane.application.merkle import leaf_hash
from controlplane.application.records import (
    ATTEMPT_FIELDS,
    EVENTS,
    FIELDS,
    NEWEST,
    REQUESTS,
    attempts_hash,
    leaf_function,
    names,
    record_bytes,
)

GOLDEN = Path(__file__).parent / "golden"
AT = 1_700_000_000.0
SAMPLES = {
    "int": 7,
    "float": 1_700_000_000.25,
    "float?": 12.5,
    "text": 'ü "=1"\n',
    "json": b'{"at":1.0,"type":"TenantCreated"}',
}


def sample(shape: str) -> tuple[object, ...]:
    """Every field different, so that no two can be mixed up; the last number is absent."""
    made: list[object] = []
    for number, (_, kind) in enumerate(FIELDS[shape]):
        value = SAMPLES[kind]
        if isinstance(value, str):
            value += str(number)
        made.append(value + number if isinstance(value, int | float) else value)
    absent = [at for at, (_, kind) in enumerate(FIELDS[shape]) if kind == "float?"]
    if absent:
        made[absent[-1]] = None
    return tuple(made)


def test_every_shape_is_written_as_it_always_was() -> None:
    """A new column is a new shape with a golden file of its own; a frozen one is never edited."""
    for shape in FIELDS:
        record = record_bytes(shape, sample(shape))
        assert record == (GOLDEN / f"{shape.replace('/', '-')}.txt").read_bytes(), shape
        assert leaf_function(shape)(sample(shape)) == leaf_hash(record)


def test_a_blob_never_passes_for_a_text() -> None:
    """JSON writes bytes as text: an empty blob for an empty text must not give the same leaf."""
    for shape in FIELDS:
        columns = list(sample(shape))
        at = [kind for _, kind in FIELDS[shape]].index("text")
        for wrong in (b"", 7, None):
            columns[at] = wrong
            with pytest.raises(TypeError, match=names(shape)[at]):
                leaf_function(shape)(tuple(columns))


def test_every_stored_column_is_in_the_newest_shape() -> None:
    """A column that the leaf does not cover could be changed unseen."""
    event = {field.column for field in Event._meta.concrete_fields}
    assert event == {*names(NEWEST[EVENTS]), "hash"}
    request = {field.column for field in InferenceRequest._meta.concrete_fields}
    assert {*request, "attempts_hash"} == set(names(NEWEST[REQUESTS]))
    attempt = {field.column for field in Attempt._meta.concrete_fields}
    assert attempt == {*(name for name, _ in ATTEMPT_FIELDS), "id", "position"}


def test_attempts_are_hashed_as_they_always_were() -> None:
    """Each field by its kind and in its order; a field of another kind gives no hash at all."""
    tries = [
        ("req-1", 0, 1, "n1", "r1", "error", "node_lost", 0, 0, None, AT, 200.0),
        ("req-1", 0, 2, "n2", "r2", "ok", "", 3, 8, 0.5, AT + 0.25, 1.5),
    ]
    assert attempts_hash(tries) == (GOLDEN / "attempts-1.txt").read_text().strip()
    assert attempts_hash(()) == ""
    changed = [(*tries[0][:8], 1, *tries[0][9:]), tries[1]]
    assert attempts_hash(changed) != attempts_hash(tries) != attempts_hash(tries[::-1])
    assert "node_id is bytes" in attempts_hash([(*tries[0][:3], b"n1", *tries[0][4:])])
