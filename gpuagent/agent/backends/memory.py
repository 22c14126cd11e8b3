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

On a CPU the pools of the replicas in one worker are one (``engine.shared_pool``): what is said here
is a replica's guarantee, and it may use what the others leave, up to those ``max_batch`` sequences.

An encoder has weights and the activations of a step, and nothing else.

A replica on two workers has the model's weights and activations twice; a tenth of its memory is
what the two share (``arena``); the prefill worker's pool is a quarter of the rest but at most four
full sequences, and the decode worker's swap space takes in at least one.

A group has an equal share of the memory on each device, and a block is as large as a rank has KV
heads, so the ranks could have different numbers of blocks; they get the least of these, for one
block table is for all. There is no swap space. SmolLM2 in float32 on two devices of 1 GiB each:
rank 0 has two of three KV heads (30,720 bytes a token), rank 1 one (15,360), and rank 0's number
counts.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from gpuagent.agent import arena
from gpuagent.agent.backends.base import LoadError
from gpuagent.agent.reconcile import share_bytes
from gpuagent.agent.sizes import at_least, size_text
from gpuagent.engine.precision import Precision
from gpuagent.models.config import ModelConfig, estimate_memory
from gpuagent.models.encoder_config import EncoderConfig
from gpuagent.models.sharding import shard_config
from gpuagent.wire.messages import ReplicaSpec

BLOCK_SIZE = 16
MAX_DEFAULT_SWAP_BYTES = 128 << 20
DEFAULT_SWAP_SHARE = 8
PREFILL_SHARE = 4
MAX_PREFILL_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class Division:
    """What the engine is given: bytes of its KV pools together, and of swap space.

    ``kv_limit_bytes`` is what its pool may grow to by what its neighbours leave of theirs.
    """

    kv_bytes: int
    swap_bytes: int
    kv_limit_bytes: int | None = None
    num_blocks: int | None = None  # if not as many as the bytes hold


@dataclass(frozen=True, slots=True)
class _Needs:
    """Bytes: of one model's weights and activations, of the draft model's, and of one sequence of
    full length in the cache, with the draft model's and without."""

    model: int
    draft: int
    sequence: int
    sequences: int


def divide(
    spec: ReplicaSpec,
    config: ModelConfig,
    formats: Precision,
    max_model_len: int,
    draft: ModelConfig | None = None,
    role: str = "both",
) -> Division:
    """Divide ``spec.memory_bytes``; ``role`` is both, prefill or decode.

    Raises LoadError ``insufficient_memory`` if not even one sequence of full length would fit.
    """
    num_tokens = max_model_len + BLOCK_SIZE
    sequence = num_tokens * formats.kv_bytes_per_token(config)
    needs = _Needs(_fixed(spec, config, formats), 0, sequence, sequence)
    if draft:
        also = num_tokens * formats.kv_bytes_per_token(draft)
        draft_bytes = _fixed(spec, draft, formats.of_draft())
        needs = _Needs(needs.model, draft_bytes, sequence, sequence + also)
    return _on_one(spec, needs) if role == "both" else _on_two(spec, needs, role)


def divide_among(
    size: int, spec: ReplicaSpec, config: ModelConfig, formats: Precision, max_model_len: int
) -> Division:
    """What each rank of a group gets; raises LoadError insufficient_memory if one sequence of full
    length does not fit all of them."""
    share = replace(spec, memory_bytes=share_bytes(spec), swap_bytes=0)
    fits = []
    for rank in range(size):
        part = shard_config(config, rank, size)
        each = divide(share, part, formats, max_model_len)
        fits.append((each.kv_bytes // (BLOCK_SIZE * formats.kv_bytes_per_token(part)), each))
    num_blocks, tightest = min(fits, key=lambda fit: fit[0])
    return Division(tightest.kv_bytes, 0, num_blocks=num_blocks)


def check_encoder(spec: ReplicaSpec, config: EncoderConfig, dtype: str) -> None:
    """Raise LoadError ``insufficient_memory`` if weights and a step do not fit the budget."""
    weights = config.weights_bytes(dtype)
    longest = max(spec.max_batch_tokens, min(spec.max_model_len, config.max_length))
    workspace = config.workspace_bytes(dtype, longest)
    if weights + workspace > spec.memory_bytes:
        text = f"{size_text(weights)} for weights and {size_text(workspace)} for activations"
        raise _too_small(spec, text, weights + workspace)


def _on_one(spec: ReplicaSpec, needs: _Needs) -> Division:
    fixed, swap = needs.model + needs.draft, spec.swap_bytes
    left = spec.memory_bytes - fixed - (swap or 0)
    if left < needs.sequences:
        least = fixed + (swap or 0) + needs.sequences
        raise _insufficient(spec, (fixed, swap or 0, needs.sequences), least)
    if swap is None:
        swap = min(left // DEFAULT_SWAP_SHARE, MAX_DEFAULT_SWAP_BYTES, left - needs.sequences)
        left -= swap
    most = spec.max_batch * needs.sequences
    return Division(min(left, most), swap, kv_limit_bytes=most)


def _on_two(spec: ReplicaSpec, needs: _Needs, role: str) -> Division:
    fixed = 2 * needs.model + needs.draft + spec.memory_bytes // arena.SHARE
    left = spec.memory_bytes - fixed
    default = min(left // DEFAULT_SWAP_SHARE, MAX_DEFAULT_SWAP_BYTES)
    swap = max(default if spec.swap_bytes is None else spec.swap_bytes, needs.sequence)
    left -= swap
    if left < needs.sequence + needs.sequences:
        parts = fixed, swap, needs.sequence + needs.sequences
        raise _insufficient(spec, parts, _least_of_two(spec, needs))
    share = min((left - needs.sequences) // PREFILL_SHARE, MAX_PREFILL_SEQUENCES * needs.sequence)
    prefill = max(share, needs.sequence)
    if role == "prefill":
        return Division(prefill, 0)
    return Division(min(left - prefill, spec.max_batch * needs.sequences), swap)


def _least_of_two(spec: ReplicaSpec, needs: _Needs) -> int:
    """The least memory that ``_on_two`` can divide. An eighth of what is left is swap space, so a
    seventh of what is needed beside it."""
    cache = needs.sequence + needs.sequences
    default = min(-(-cache // (DEFAULT_SWAP_SHARE - 1)), MAX_DEFAULT_SWAP_BYTES)
    swap = max(default if spec.swap_bytes is None else spec.swap_bytes, needs.sequence)
    rest = 2 * needs.model + needs.draft + swap + cache
    return -(-rest * arena.SHARE // (arena.SHARE - 1))


def _insufficient(spec: ReplicaSpec, parts: tuple[int, int, int], least: int) -> LoadError:
    fixed, swap, cache = (size_text(one) for one in parts)
    text = f"{fixed} for weights and activations, {swap} of swap space and {cache} for one "
    return _too_small(spec, text + "sequence's cache", least)


def _too_small(spec: ReplicaSpec, parts: str, least: int) -> LoadError:
    """``least`` bytes would do."""
    budget = f"{parts} are more than the budget of {size_text(spec.memory_bytes)}"
    return LoadError("insufficient_memory", f"{budget}; give it at least {at_least(least)}")


def _fixed(spec: ReplicaSpec, config: ModelConfig, formats: Precision) -> int:
    return estimate_memory(config, formats.dtype, 0, spec.max_batch_tokens, formats.quantization)
