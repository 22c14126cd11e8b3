"""MessagePack in and out, with one typed error for everything malformed."""

from typing import TypeVar

import msgspec

from gpuagent.wire.messages import WIRE_VERSION, Frame, Message

MAX_PAYLOAD_BYTES = 1024 * 1024

T = TypeVar("T", bound=Message | Frame)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder] = {}


class WireError(ValueError):
    """The bytes are not a message of the expected type and version."""


def encode(message: Message | Frame) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes, kind: type[T], max_bytes: int = MAX_PAYLOAD_BYTES) -> T:
    """Decode ``payload`` as ``kind``; raises WireError on malformed, oversized or newer input.

    Only what travels in chunks (a tokenizer bundle) is read with another ``max_bytes``.
    """
    if len(payload) > max_bytes:
        raise WireError(f"{len(payload)} bytes is more than {max_bytes}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        message: T = decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:  # deep nesting recurses
        raise WireError(str(error)) from error
    if message.v > WIRE_VERSION:
        raise WireError(f"version {message.v} is newer than {WIRE_VERSION}")
    return message
