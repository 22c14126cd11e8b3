"""One rank's part of a model: which slices of which matrices, so that partial sums add up.

The Megatron layout (Shoeybi et al. 2019, section 3). The projections into a block are divided by
outputs, those out of it by inputs, so a block needs one sum over the ranks, at its end:

    q, k, v       rows, by KV heads with the query heads that share them   x -> own heads
    o             columns, the same heads                                  own heads -> partial sum
    gate, up      rows, of the MLP's width                                 x -> own part
    down          columns, the same part                                   own part -> partial sum
    the rest      every rank has all of it: embedding, norms, head

What does not divide evenly is divided unevenly, the first ranks having one more: KV head, or 32
columns of the MLP, which is what the native kernels take at a time. Example, SmolLM2-135M
(9 query heads, 3 KV heads of 64, MLP 1,536) for two ranks, as rows of the checkpoint:

    rank 0   KV heads 0 1   q 0..383     k, v 0..127     o columns 0..383     gate, up 0..767
    rank 1   KV head 2      q 384..575   k, v 128..191   o columns 384..575   gate, up 768..1535

The bias of `o`, where there is one, is rank 0's alone, or it would be added once for each rank.
Tensors are cut before they are checked or converted, so of the mapped files a rank reads the pages
that its part lies on (of columns that is most of them) and copies nothing that need not be.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from gpuagent.models.config import ModelConfig
from gpuagent.models.errors import LoadError

BY_ROWS = {
    "q_proj": "heads",
    "k_proj": "kv_heads",
    "v_proj": "kv_heads",
    "gate_proj": "middle",
    "up_proj": "middle",
}
UNIT = 32  # columns of the MLP that stay together
BY_COLUMNS = {"o_proj": "heads", "down_proj": "middle"}


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`. `total` adds the partial sums (T, hidden) of all ranks, and gives
    each the same bits."""

    rank: int
    size: int
    total: Callable[[Tensor], Tensor]


def check_degree(config: ModelConfig, size: int) -> None:
    """Raise LoadError tensor_parallel_unsupported if a rank would have nothing to compute."""
    most = min(config.num_kv_heads, config.intermediate_size)
    if not 1 <= size <= most:
        text = f"{config.num_kv_heads} KV heads cannot be divided among {size} devices"
        raise LoadError("tensor_parallel_unsupported", text)


def part_of(total: int, rank: int, size: int) -> slice:
    """The rank's part of `total` things; of three for two ranks: 0..1 and 2."""
    each, rest = divmod(total, size)
    start = rank * each + min(rank, rest)
    return slice(start, start + each + (rank < rest))


def middle_part(total: int, rank: int, size: int) -> slice:
    """The rank's part of the MLP's width, in whole units where there are enough of them."""
    unit = UNIT if total % UNIT == 0 and total // UNIT >= size else 1
    return _times(part_of(total // unit, rank, size), unit)


def shard_config(config: ModelConfig, rank: int, size: int) -> ModelConfig:
    """The shape of the rank's part: its heads and its part of the MLP."""
    check_degree(config, size)
    kv_heads = part_of(config.num_kv_heads, rank, size)
    middle = middle_part(config.intermediate_size, rank, size)
    num_kv_heads = kv_heads.stop - kv_heads.start
    return replace(
        config,
        num_heads=num_kv_heads * (config.num_heads // config.num_kv_heads),
        num_kv_heads=num_kv_heads,
        intermediate_size=middle.stop - middle.start,
    )


class Slices:
    """Cuts a checkpoint's tensors by name for one rank."""

    def __init__(self, config: ModelConfig, rank: int, size: int) -> None:
        heads = part_of(config.num_kv_heads, rank, size)
        per_kv = config.num_heads // config.num_kv_heads
        self._rank = rank
        self._whole = {
            "heads": config.num_heads * config.head_dim,
            "kv_heads": config.num_kv_heads * config.head_dim,
            "middle": config.intermediate_size,
        }
        self._parts = {
            "heads": _times(heads, per_kv * config.head_dim),
            "kv_heads": _times(heads, config.head_dim),
            "middle": middle_part(config.intermediate_size, rank, size),
        }

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The rank's part of the tensor, a view; what is not divided as it is."""
        projection = name.rpartition(".")[0].rpartition(".")[2]
        if projection in BY_ROWS:
            return tensor[self._part(name, tensor, 0, BY_ROWS[projection])]
        if projection in BY_COLUMNS and name.endswith(".weight"):
            return tensor[:, self._part(name, tensor, 1, BY_COLUMNS[projection])]
        if projection in BY_COLUMNS and self._rank > 0:
            return tensor.new_zeros(tensor.shape)
        return tensor

    def _part(self, name: str, tensor: Tensor, dimension: int, what: str) -> slice:
        size = tensor.shape[dimension] if tensor.dim() > dimension else 0
        if size != self._whole[what]:
            text = f"{name} is {tuple(tensor.shape)}, the config says {self._whole[what]}"
            raise LoadError("weights_malformed", text)
        return self._parts[what]


def _times(part: slice, number: int) -> slice:
    return slice(part.start * number, part.stop * number)
