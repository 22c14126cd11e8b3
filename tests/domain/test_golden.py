"""Every event ever stored stays readable.

``golden/<Type>.<schema version>.json`` holds stored bytes as some release wrote them, and is never
edited. Run ``python -m tests.domain.test_golden`` to write the files of new types or versions.
"""

import json
from pathlib import Path

import msgspec
import pytest

from controlplane.domain import event_types, upcasters
from controlplane.domain.event_types import (
    EVENT_TYPES,
    UnknownEvent,
    decode,
    encode,
    schema_version,
    type_of,
)
from tests.domain.samples import SAMPLES

GOLDEN = Path(__file__).parent / "golden"
BY_TYPE = {type_of(sample): sample for sample in SAMPLES}


def path_of(name: str) -> Path:
    return GOLDEN / f"{name}.{schema_version(name)}.json"


@pytest.mark.parametrize("name", sorted(EVENT_TYPES))
def test_every_type_has_a_golden_file_that_reads_as_its_sample(name: str) -> None:
    """The frozen bytes give the same value as ever, and the value gives the same bytes."""
    stored = path_of(name).read_bytes().rstrip(b"\n")
    assert decode(name, schema_version(name), stored) == BY_TYPE[name]
    assert encode(BY_TYPE[name]) == stored


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_every_golden_file_is_still_read(path: Path) -> None:
    """Old schema versions too, through their upcasters."""
    name, version, _ = path.name.split(".")
    assert isinstance(decode(name, int(version), path.read_bytes()), EVENT_TYPES[name])


@pytest.mark.parametrize("name", sorted(EVENT_TYPES))
def test_stored_bytes_are_canonical_json(name: str) -> None:
    """Sorted keys, no spaces, the type in it: equal events have equal bytes and hashes."""
    stored = encode(BY_TYPE[name])
    value = json.loads(stored)
    assert value["type"] == name
    assert json.dumps(value, sort_keys=True, separators=(",", ":")).encode() == stored


def test_a_type_or_version_of_the_future_is_not_guessed_at() -> None:
    with pytest.raises(UnknownEvent):
        decode("ModelPainted", 1, b'{"type":"ModelPainted"}')
    with pytest.raises(UnknownEvent):
        decode("RouteDeleted", 2, b'{"type":"RouteDeleted","name":"chat","at":3.0}')


def test_an_old_version_is_lifted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 had no name for ``sticky``, version 2 called it ``fixed``: both read as today's."""
    monkeypatch.setitem(event_types.SCHEMA_VERSIONS, "RouteCreated", 3)
    monkeypatch.delitem(event_types._of_today, ("RouteCreated", 1))
    lift = upcasters.UPCASTERS
    monkeypatch.setitem(lift, ("RouteCreated", 1), lambda data: {**data, "fixed": True})
    monkeypatch.setitem(
        lift,
        ("RouteCreated", 2),
        lambda data: {**{k: v for k, v in data.items() if k != "fixed"}, "sticky": data["fixed"]},
    )
    today = msgspec.json.decode(encode(BY_TYPE["RouteCreated"]))
    oldest = {key: value for key, value in today.items() if key != "sticky"}
    assert decode("RouteCreated", 1, msgspec.json.encode(oldest)) == BY_TYPE["RouteCreated"]


if __name__ == "__main__":
    for sample in SAMPLES:
        path = path_of(type_of(sample))
        if not path.exists():
            path.write_bytes(encode(sample) + b"\n")
