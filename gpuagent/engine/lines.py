"""What passes between rank 0 of a group and another rank, over one socket: a *line*.

A frame is a 4-byte big-endian length and one MessagePack value, an array whose first item names the
order. Pickle was rejected: whoever can write into the line would own the process. The socket is one
of a pair on the same machine; to a rank on another one it is a TCP connection, which the agents of
both have seen through before anything here is read (`gpuagent.agent.fabric`)::

    another rank -> rank 0    Put  Add  Await  Met       while they meet (`meeting`)
    rank 0 -> another rank    Found                      to Add and Await
                              Step  CopyBlocks  Erase    from then on (`ranks`)
"""

import select
import socket
import struct

import msgspec

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_cache import Copy

_LENGTH = struct.Struct(">I")
MAX_ORDER_BYTES = 64 << 20
_encoder = msgspec.msgpack.Encoder()


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Base of what passes over a line."""


class Put(Order, frozen=True, tag="put"):
    """Keep the value for all ranks."""

    key: str
    value: bytes


class Add(Order, frozen=True, tag="add"):
    """Add to a number that is kept so, and answer with the sum."""

    key: str
    amount: int


class Await(Order, frozen=True, tag="await"):
    """Answer with the values once all of them have been put."""

    keys: list[str]


class Found(Order, frozen=True, tag="found"):
    values: list[bytes]


class Met(Order, frozen=True, tag="met"):
    """This rank asks for no more."""


class Step(Order, frozen=True, tag="step"):
    """Compute the works, in this order."""

    works: list[Work]


class CopyBlocks(Order, frozen=True, tag="copy"):
    copies: list[Copy]


class Erase(Order, frozen=True, tag="erase"):
    work: Work


ANY = Put | Add | Await | Found | Met | Step | CopyBlocks | Erase


class Line:
    """One rank's end of its line to rank 0, or rank 0's end of one to another rank."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(ANY)
        self._buffer = bytearray()

    def fileno(self) -> int:
        """For `poll`."""
        return self._end.fileno()

    def close(self) -> None:
        """Let the other end know that this one is gone."""
        self._end.close()

    def send(self, frame: bytes) -> None:
        """Send what `framed` made."""
        self._end.sendall(frame)

    def next(self, timeout_s: float | None = None) -> Order | None:
        """The next order; None after the timeout. Raises EOFError when the other end is gone, or
        sends what is no order."""
        while (body := self._taken()) is None:
            if timeout_s is not None and not select.select([self._end], [], [], timeout_s)[0]:
                return None
            try:
                chunk = self._end.recv(1 << 18)
            except ConnectionError as error:  # reset, by a machine that was lost
                raise EOFError("the other end of the line is lost") from error
            if not chunk:
                raise EOFError("the other end of the line is gone")
            self._buffer += chunk
        try:
            order: Order = self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise EOFError(f"the other end sends what is no order: {error}") from error
        return order

    def _taken(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if end > MAX_ORDER_BYTES:
            raise EOFError(f"the other end sends an order of {end} bytes")
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body


def framed(order: Order) -> bytes:
    """An order with its length before it."""
    body = _encoder.encode(order)
    return _LENGTH.pack(len(body)) + body
