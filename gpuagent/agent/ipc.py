"""What passes between the agent and an engine worker, over one socket pair.

A frame is a 4-byte big-endian length and one MessagePack value: an array whose first item names
the message. The worker makes wire deltas itself, so that the agent only sorts them by gateway::

    agent  -> worker   Load  Unload  Add  Cancel  Shutdown
                       SwapOut  SwapIn                       of a loaded replica
                       Adopt  Free                           of a replica on two workers: ``pairs``
    worker -> agent    Progress*  Loaded | LoadFailed        one of the two ends each Load
                       StepOutputs                           after each step that produced something
                       ReplicaFailed | Unloaded
                       Swapped                               ends each SwapOut and SwapIn
                       Stats                                 while it works, at most 5/s
                       HandOver  Taken                       of a replica on two workers

Pickle was rejected: whoever can write into the pipe would own the process.
"""

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from gpuagent.wire.messages import Delta, Device, Generate, ReplicaSpec, TokenizerBundle

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


class GroupConfig(msgspec.Struct, frozen=True):
    """A worker's place in a group: ``lines`` are descriptors of sockets, to each other rank from
    rank 0, to rank 0 from the others. All must have loaded ``start_s`` after the first has. They
    sum over the network ``interface``."""

    rank: int
    size: int
    lines: tuple[int, ...]
    start_s: float
    interface: str = "lo"


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker knows from its start.

    ``role`` is both, or what it does of a replica on two workers: prefill | decode; then ``arena``
    is the descriptor of the memory that they share. ``group``: it is one of a group's ranks. The
    rest is for vLLM: the Python that has it ("": none), options of its server, and how long it may
    take to start and be silent at work.
    """

    device: Device
    threads: int
    model_cache: str
    file_roots: tuple[str, ...] = ()
    role: str = "both"
    arena: int = -1
    vllm_python: str = ""
    vllm_options: tuple[str, ...] = ()
    start_seconds: float = 600.0
    stall_seconds: float = 30.0
    group: GroupConfig | None = None

    @property
    def name(self) -> str:
        """What it is to its replicas: both | prefill | decode | rank 0 | rank 1 ..."""
        return self.role if self.group is None else f"rank {self.group.rank}"


class Ipc(msgspec.Struct, frozen=True, array_like=True):
    """Base of all frames."""


class Load(Ipc, frozen=True, tag="load"):
    spec: ReplicaSpec


class Unload(Ipc, frozen=True, tag="unload"):
    replica_id: str


class SwapOut(Ipc, frozen=True, tag="swap_out"):
    """Off the device, unfinished requests included; the worker keeps it in host memory."""

    replica_id: str


class SwapIn(Ipc, frozen=True, tag="swap_in"):
    replica_id: str


class Add(Ipc, frozen=True, tag="add"):
    request: Generate


class Cancel(Ipc, frozen=True, tag="cancel"):
    replica_id: str
    request_id: str


class Continuation(msgspec.Struct, frozen=True, array_like=True):
    """Where a request stands (see ``engine.request.HandOver``) and where its keys and values are:
    ``size`` bytes of the shared memory from ``start`` on."""

    token_ids: tuple[int, ...]
    seed: int
    num_computed: int
    num_cached: int
    start: int
    size: int


class Adopt(Ipc, frozen=True, tag="adopt"):
    request: Generate
    state: Continuation


class Free(Ipc, frozen=True, tag="free"):
    """The other worker has read what was handed over at ``start``."""

    start: int


class Shutdown(Ipc, frozen=True, tag="shutdown"):
    pass


class Progress(Ipc, frozen=True, tag="progress"):
    """``state`` is downloading or loading; ``fraction`` of the stage done, 0..1."""

    replica_id: str
    state: str
    stage: str
    fraction: float


class Loaded(Ipc, frozen=True, tag="loaded"):
    replica_id: str
    weights_bytes: int
    kv_bytes: int
    peak_bytes: int
    load_seconds: float
    sha256: str
    max_model_len: int
    bundle: TokenizerBundle
    warning_code: str = ""
    warning: str = ""
    workspace_bytes: int = 0


class LoadFailed(Ipc, frozen=True, tag="load_failed"):
    replica_id: str
    code: str
    message: str


class ReplicaFailed(Ipc, frozen=True, tag="replica_failed"):
    """A step raised; the engine is gone and all its requests with it."""

    replica_id: str
    code: str
    message: str


class Unloaded(Ipc, frozen=True, tag="unloaded"):
    replica_id: str


class Swapped(Ipc, frozen=True, tag="swapped"):
    """``tier`` is resident or host; ``host_bytes`` are what it takes of the host's memory there."""

    replica_id: str
    tier: str
    seconds: float
    host_bytes: int = 0


class StepOutputs(Ipc, frozen=True, tag="outputs"):
    replica_id: str
    deltas: list[Delta]


class HandOver(Ipc, frozen=True, tag="hand_over"):
    """A request whose prompt is computed; this worker has forgotten it."""

    replica_id: str
    request_id: str
    state: Continuation


class Taken(Ipc, frozen=True, tag="taken"):
    replica_id: str
    start: int


class ReplicaStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters are totals since the replica was loaded; the two ``*_seconds`` split busy time."""

    replica_id: str
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 16
    num_steps: int = 0
    busy_seconds: float = 0.0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    cached_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0
    num_recomputed: int = 0
    swapped_bytes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    waiting_by_class: dict[str, int] = {}
    kv_held_bytes: int = 0
    prefix_filter: bytes = b""


class Stats(Ipc, frozen=True, tag="stats"):
    replicas: list[ReplicaStats]


ToWorker = Load | Unload | SwapOut | SwapIn | Add | Cancel | Adopt | Free | Shutdown
FromWorker = (
    Progress
    | Loaded
    | LoadFailed
    | ReplicaFailed
    | Unloaded
    | Swapped
    | StepOutputs
    | Stats
    | HandOver
    | Taken
)
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The other end sent something that is no frame."""


def frame(message: Ipc) -> bytes:
    """``message`` with its length before it."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def _length(header: bytes | bytearray) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes")
    return length


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes | bytearray) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


class WorkerEnd:
    """The worker's side: blocking writes, reads of whatever has arrived."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: FromWorker) -> None:
        self._socket.sendall(frame(message))

    def receive(self) -> Iterator[ToWorker]:
        """Every message complete after one read; raises EOFError when the agent is gone.

        Call when readable: the read blocks otherwise.
        """
        chunk = self._socket.recv(1 << 18)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        while (body := self._take()) is not None:
            yield _decode(self._decoder, body)

    def _take(self) -> bytearray | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _length(self._buffer[: _LENGTH.size])
        if len(self._buffer) < end:
            return None
        body = self._buffer[_LENGTH.size : end]
        del self._buffer[:end]
        return body


class AgentEnd:
    """The agent's side, on the event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(FromWorker)

    def send(self, message: ToWorker | ReplicaFailed) -> None:
        """Queue without waiting; what a hung worker leaves unread goes with its process."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> FromWorker:
        """The next message; raises EOFError when the worker is gone."""
        try:
            header = await self._reader.readexactly(_LENGTH.size)
            body = await self._reader.readexactly(_length(header))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EOFError from error
        return _decode(self._decoder, body)

    def close(self) -> None:
        self._writer.close()
