"""The wire contract: frozen bytes, typed refusals, subjects that name one node."""

import random
from typing import Any

import msgspec
import pytest

from gpuagent.wire import codec, messages, subjects
from tests.wire.samples import SAMPLES, golden, mutated

KINDS = {type(sample).__name__: type(sample) for sample in SAMPLES}


def test_every_message_has_a_golden_sample() -> None:
    """Parts that travel only inside others are frozen with them."""
    parts = {"Message", "Delta", "TokenLogprob", "TopLogprob", "Produced"}
    defined = {
        name
        for name, kind in vars(messages).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    assert defined - parts == set(KINDS) == set(golden())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_bytes_of_a_released_message_never_change(
    sample: messages.Message | messages.Frame,
) -> None:
    frozen = bytes.fromhex(golden()[type(sample).__name__][-1])
    assert codec.encode(sample) == frozen
    assert codec.decode(frozen, type(sample)) == sample


OLDER = [
    (KINDS[name], bytes.fromhex(form)) for name, forms in golden().items() for form in forms[:-1]
]


@pytest.mark.parametrize(("kind", "frozen"), OLDER)
def test_an_older_form_reads_as_ever_with_later_fields_at_their_defaults(
    kind: type[messages.Message], frozen: bytes
) -> None:
    """A node or control plane of the last release goes on being understood. Compared is what the
    bytes say: a message that has got its sixteenth field has a longer header for the same map, and
    one that travels as an array has its new fields at the end."""
    again = codec.encode(codec.decode(frozen, kind))
    assert _says(msgspec.msgpack.decode(again), msgspec.msgpack.decode(frozen))


def _says(newer: Any, older: Any) -> bool:
    """Whether all of ``older`` is in ``newer``, which may be longer where it is an array."""
    if not isinstance(older, list):
        return newer == older
    return len(newer) >= len(older) and all(map(_says, newer, older))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_samples_set_every_field(sample: messages.Message | messages.Frame) -> None:
    """A field left at its default would not be frozen."""
    for field in msgspec.structs.fields(sample):
        if field.name != "v" and not field.required:
            assert getattr(sample, field.name) != field.default, field.name


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)
def test_a_newer_version_is_refused(sample: messages.Message | messages.Frame) -> None:
    newer = codec.encode(msgspec.structs.replace(sample, v=messages.WIRE_VERSION + 1))
    with pytest.raises(codec.WireError, match="newer"):
        codec.decode(newer, type(sample))


def test_an_unknown_field_of_an_equal_version_is_ignored() -> None:
    """So a field can be added while old agents still run."""
    cancel = {"gateway": "g", "request_ids": ["a"], "why": "added later"}
    decoded = codec.decode(msgspec.msgpack.encode(cancel), messages.Cancel)
    assert decoded == messages.Cancel(gateway="g", request_ids=("a",))


def test_an_oversized_message_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(codec.WireError, match="more than"):
        codec.decode(b"\xc0" * (codec.MAX_PAYLOAD_BYTES + 1), messages.Cancel)


def test_ten_thousand_mutated_messages_are_decoded_or_typed_errors() -> None:
    """No other exception, whatever is flipped, cut, repeated or inserted."""
    rng = random.Random(11)
    encoded = [(type(sample), codec.encode(sample)) for sample in SAMPLES]
    num_refused = 0
    for _ in range(10_000):
        kind, payload = rng.choice(encoded)
        try:
            codec.decode(mutated(rng, payload), kind)
        except codec.WireError:
            num_refused += 1
    assert num_refused > 2_000, "the mutations bite"


def test_nesting_without_end_is_a_typed_error() -> None:
    """Also inside a field that is skipped because nobody knows it."""
    deep = b"\x91" * 500_000 + b"\xc0"
    fields = ("gateway", "g", "request_ids", [], "unknown")
    unknown = b"\x83" + b"".join(map(msgspec.msgpack.encode, fields)) + deep
    for payload, kind in ((deep, messages.Frame), (unknown, messages.Cancel)):
        with pytest.raises(codec.WireError):
            codec.decode(payload, kind)


def test_each_subject_names_exactly_one_node() -> None:
    named = [
        subjects.telemetry("n1"),
        subjects.generate("n1"),
        subjects.cancel("n1"),
        subjects.resend("n1"),
        subjects.frames("gw", "n1"),
        subjects.close("n1"),
        subjects.closed("gw", "n1"),
    ]
    assert len(set(named)) == 7
    assert all(subject.split(".")[-1] == "n1" for subject in named)
    assert subjects.frames_of("gw").startswith("engine.frames.gw.")
    assert subjects.closed_of("gw").startswith("engine.closed.gw.")
