"""A record's canonical bytes never change, and hold every column that is stored."""

from pathlib import Path

import pytest

from controlplane.adapters.eventstore.models import Event
from controlplane.adapters.ledger.models import InferenceRequest
from controlplane.application.merkle import leaf_hash
from controlplane.application.records import (
    EVENTS,
    FIELDS,
    NEWEST,
    REQUESTS,
    leaf_function,
    names,
    record_bytes,
)

GOLDEN = Path(__file__).parent / "golden"
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
    assert request == set(names(NEWEST[REQUESTS]))
