"""AWQ checkpoints as they are published, and which of them are read. No torch.

A projection of `in` inputs and `out` outputs is stored as three tensors instead of one:

    qweight   (in, out / 8) int32           eight outputs of an input in one word
    qzeros    (in / group, out / 8) int32   the same for the zero points of each group of inputs
    scales    (in / group, out) float16

    w[o, i] = (q[i, o] - zero[i / group, o]) * scale[i / group, o]

(Lin et al., "AWQ: Activation-aware Weight Quantization", MLSys 2024; the "gemm" layout.) The
eight outputs are interleaved, because GPU kernels want it so: the half-bytes of a word, lowest
first, are outputs 0 2 4 6 1 3 5 7. Example: outputs 0 to 7 with the values 0 to 7 give the word
0x75316420.

The scaling that AWQ searches for is in the checkpoint's norms and scales already; nothing of it
is left to do when reading.
"""

from collections.abc import Mapping
from typing import Any

from gpuagent.models.errors import LoadError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word's half-bytes
PLACES = tuple(ORDER.index(output) for output in range(8))
GROUPS = (32, 64, 128, 256)
IGNORED_KEYS = {"backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"}
CONVERTED = ("self_attn", "mlp", "proj", "layers")


def group_size(values: Mapping[str, Any]) -> int:
    """Inputs that share a scale, from a config.json's contents; 0 if it is not quantised.

    Raises LoadError for any other quantisation than four-bit AWQ in the "gemm" layout.
    """
    found = values.get("quantization_config")
    if found is None:
        return 0
    if not isinstance(found, dict) or found.get("quant_method") != "awq":
        raise LoadError("config_rejected", "of quantised checkpoints only AWQ is read")
    plain = {key: value for key, value in found.items() if key not in IGNORED_KEYS}
    known = {"quant_method", "bits", "group_size", "version", "zero_point"}
    if unknown := sorted(set(plain) - known - {"modules_to_not_convert"}):
        raise LoadError("config_rejected", f"quantization_config: {', '.join(unknown)[:200]}")
    layout = plain.get("bits"), str(plain.get("version", "gemm")).lower(), plain.get("zero_point")
    if layout != (4, "gemm", True):
        raise LoadError("config_rejected", f"AWQ is 4 bits, gemm, zero points; not {layout!r:.80}")
    size = plain.get("group_size")
    if type(size) is not int or size not in GROUPS:
        raise LoadError("config_rejected", f"group_size {size!r:.20} is not in {GROUPS}")
    _check_kept(plain.get("modules_to_not_convert"))
    return size


def _check_kept(names: Any) -> None:
    """Only what lies outside the layers may have been left unquantised."""
    names = [] if names is None else names
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise LoadError("config_invalid", "modules_to_not_convert is not a list of names")
    if any(part in name for name in names for part in CONVERTED):
        raise LoadError("config_rejected", "layers that are quantised in part are not supported")
