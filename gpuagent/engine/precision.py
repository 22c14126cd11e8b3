"""Number formats: what was asked of a model, and what follows from it. No torch.

Three formats are chosen by two words, `quantization` and `kv_cache_dtype` (here on a CPU):

    quantization        matrices                activations   cache by "auto"   cache also
    none                float32                 float32       float32           int8
    bf16                bfloat16                bfloat16      bfloat16          int8
    int8                int8 per output         int8          int8              float32
    int8-weight-only    int8 per 32 inputs      float32       float32           int8
    awq-int4            as in the checkpoint    float32       float32           int8, bfloat16

"awq-int4" with a bfloat16 cache also has bfloat16 activations: torch's packed kernels want them.
On a GPU "none" is bfloat16, and so is what is float32 in the other rows.
"""

from dataclasses import dataclass, replace

from gpuagent.models.config import DTYPE_BYTES, ModelConfig
from gpuagent.models.errors import LoadError

QUANTIZATIONS = ("none", "int8", "int8-weight-only", "awq-int4")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Precision:
    """`dtype` is that of activations and of what is not quantised, `kv_dtype` the cache's."""

    dtype: str = "float32"
    quantization: str = "none"
    kv_dtype: str = "float32"

    def kv_bytes_per_token(self, config: ModelConfig) -> int:
        """Bytes of one token's keys and values in all layers."""
        return config.kv_bytes_per_token(self.kv_dtype)

    def of_draft(self) -> "Precision":
        """The formats of a draft model. In float32 it would only be slower: a guess is compared
        with its target's token, so int8 weights cost a little acceptance and change no output."""
        return replace(self, quantization="int8" if self.dtype == "float32" else "none")


def precision(
    quantization: str = "none", kv_cache_dtype: str = "auto", device: str = "cpu"
) -> Precision:
    """What a version's two words mean on a device; raises LoadError where they mean nothing."""
    if quantization not in (*QUANTIZATIONS, "bf16"):
        raise LoadError("quantization_unsupported", f"{quantization!r:.40} is not supported")
    is_packed = quantization == "awq-int4" and kv_cache_dtype == "bfloat16"
    is_half = quantization == "bf16" or device != "cpu" or is_packed
    dtype = "bfloat16" if is_half else "float32"
    return of_dtype(dtype, "none" if quantization == "bf16" else quantization, kv_cache_dtype)


def of_dtype(dtype: str, quantization: str = "none", kv_cache_dtype: str = "auto") -> Precision:
    """The same for a number format of activations chosen by hand; raises LoadError."""
    if quantization not in QUANTIZATIONS:
        raise LoadError("quantization_unsupported", f"{quantization!r:.40} is not supported")
    if dtype not in DTYPE_BYTES or kv_cache_dtype not in ("auto", "int8", dtype):
        raise LoadError(
            "kv_cache_dtype_unsupported",
            f"a {kv_cache_dtype:.40} cache beside {dtype:.40} is not supported here",
        )
    if kv_cache_dtype == "auto":
        kv_cache_dtype = "int8" if quantization == "int8" else dtype
    return Precision(dtype, quantization, kv_cache_dtype)


def check_checkpoint(config: ModelConfig, quantization: str) -> None:
    """Raise LoadError where the stored weights are not what was asked for."""
    is_awq = config.awq_group > 0
    if is_awq and quantization != "awq-int4":
        raise LoadError("checkpoint_mismatch", "the checkpoint is AWQ: quantization is awq-int4")
    if quantization == "awq-int4" and not is_awq:
        raise LoadError("checkpoint_mismatch", "awq-int4 needs a checkpoint quantised by AWQ")
