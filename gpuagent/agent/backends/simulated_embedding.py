"""An embedding model without weights: real scheduling, real time, made-up vectors.

    simulated://tiny?dims=64&step_ms=20&prefill_tps=20000

The parameters are those of ``simulated``. A vector is a function of the input's tokens alone, so it
is the same in every batch, on every replica and after every restart: elements are SHA-256 of the
tokens, spread over -1 to 1, and the whole has length 1::

    (72, 105)   sha256 of 8 bytes -> 32 numbers, with "1" after them 32 more, ... dims in all
"""

import hashlib
import math
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from sys import byteorder

import msgspec

from gpuagent.agent.backends.base import LoadedModel, Progress
from gpuagent.agent.backends.simulated import (
    SimulatedParams,
    begin_load,
    make_bundle,
    parse_params,
)
from gpuagent.engine.embedding import EmbeddingEngine, Inputs
from gpuagent.wire.messages import ReplicaSpec


def load(spec: ReplicaSpec, progress: Progress) -> LoadedModel:
    """An embedding engine for a ``simulated://`` source; raises LoadError."""
    params = parse_params(spec.source)
    digest = begin_load(spec, params, progress)
    sizes = (spec.max_model_len, spec.max_batch_tokens, spec.max_batch)
    bundle = make_bundle(spec, params)
    return LoadedModel(
        engine=EmbeddingEngine(SimulatedEmbedder(spec, params), params.vocab, *sizes),
        bundle=msgspec.structs.replace(bundle, chat_template="", dimensions=params.dims),
        sha256=digest,
        max_model_len=spec.max_model_len,
        peak_bytes=spec.memory_bytes,
    )


@dataclass
class SimulatedEmbedder:
    """`gpuagent.engine.embedding.Embedder` that sleeps where others compute."""

    spec: ReplicaSpec
    params: SimulatedParams
    num_steps: int = 0

    @property
    def weights_bytes(self) -> int:
        """Half of the replica's memory, as for models that generate."""
        return self.spec.memory_bytes // 2

    def embed(self, inputs: Inputs) -> list[bytes | None]:
        """Sleep a step; the vectors."""
        self.num_steps += 1
        if self.num_steps == self.params.raises_at:
            raise RuntimeError("as the source asks")
        num_tokens = sum(map(len, inputs))
        time.sleep(self.params.step_ms / 1000 + num_tokens / self.params.prefill_tps)
        return [vector(tokens, self.params.dims) for tokens in inputs]

    def park(self) -> int:
        """There is nothing to move, so the time is all it takes."""
        time.sleep(self.params.swap_ms / 1000)
        return self.weights_bytes

    def unpark(self) -> int:
        """Come back."""
        return self.park()


def vector(tokens: tuple[int, ...], dims: int) -> bytes:
    """Little-endian float32 of length 1."""
    numbers = _numbers(array("I", tokens).tobytes())
    values = [next(numbers) for _ in range(dims)]
    norm = math.sqrt(sum(value * value for value in values))
    packed = array("f", (value / norm for value in values))
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _numbers(seed: bytes) -> Iterator[float]:
    """Endless, from -1 to 1, never 0."""
    block = 0
    while True:
        digest = hashlib.sha256(seed + (str(block).encode() if block else b"")).digest()
        yield from ((byte - 127.5) / 127.5 for byte in digest)
        block += 1
