"""How a replica's memory is divided, before anything is allocated.

    memory_bytes = weights and activations of the model, and of its draft model
                 + swap space for preempted requests
                 + KV pools, the draft model's included

The first line follows from the models' shapes and number formats. Swap space is what the version
says, else an eighth of the rest and at most 128 MiB. The pools take what is left, up to what
``max_batch`` sequences of full length can use. Example, SmolLM2-135M with 1 GiB, 16 sequences of
2,048 tokens, quantization int8 (so 12,240 bytes of cache a token):

    weights 265 MB, activations 56 MB     753 MB left
    swap space                             94 MB
    KV pool                               404 MB: 16 full sequences, so 255 MB are not used
"""

from dataclasses import dataclass

from gpuagent.agent.backends.base import LoadError
from gpuagent.engine.precision import Precision
from gpuagent.models.config import ModelConfig, estimate_memory
from gpuagent.wire.messages import ReplicaSpec

BLOCK_SIZE = 16
MAX_DEFAULT_SWAP_BYTES = 128 << 20
DEFAULT_SWAP_SHARE = 8


@dataclass(frozen=True, slots=True)
class Division:
    """What the engine is given: bytes of its KV pools together, and of swap space."""

    kv_bytes: int
    swap_bytes: int


def divide(
    spec: ReplicaSpec,
    config: ModelConfig,
    formats: Precision,
    max_model_len: int,
    draft: ModelConfig | None = None,
) -> Division:
    """Divide ``spec.memory_bytes``.

    Raises LoadError ``insufficient_memory`` if not even one sequence of full length would fit.
    """
    fixed = _fixed(spec, config, formats)
    per_token = formats.kv_bytes_per_token(config)
    if draft:
        fixed += _fixed(spec, draft, formats.of_draft())
        per_token += formats.kv_bytes_per_token(draft)
    per_sequence = (max_model_len + BLOCK_SIZE) * per_token
    left = spec.memory_bytes - fixed - (spec.swap_bytes or 0)
    if left < per_sequence:
        raise LoadError(
            "insufficient_memory",
            f"{fixed} bytes for weights and activations, {spec.swap_bytes or 0} of swap space and "
            f"{per_sequence} for one sequence's cache are more than the budget of "
            f"{spec.memory_bytes}",
        )
    swap = spec.swap_bytes
    if swap is None:
        swap = min(left // DEFAULT_SWAP_SHARE, MAX_DEFAULT_SWAP_BYTES, left - per_sequence)
        left -= swap
    return Division(min(left, spec.max_batch * per_sequence), swap)


def _fixed(spec: ReplicaSpec, config: ModelConfig, formats: Precision) -> int:
    return estimate_memory(config, formats.dtype, 0, spec.max_batch_tokens, formats.quantization)
