"""What loading a decoder and loading an encoder have in common."""

import logging
import threading

import torch

from gpuagent.engine.precision import Precision

SLOW_BF16 = (
    "slow_bf16",
    "bf16 is computed without hardware support on this processor: expect a fraction of the speed "
    "of float32 or int8",
)
LOADING = threading.Lock()  # one at a time: two peaks together might be more than there is
logger = logging.getLogger(__name__)


def warning_of(formats: Precision, device: str) -> tuple[str, str]:
    """Why this will be slow, for the log and the replica's state."""
    if device != "cpu" or formats.dtype != "bfloat16" or has_fast_bf16():
        return "", ""
    logger.warning("%s: %s", *SLOW_BF16)
    return SLOW_BF16


def has_fast_bf16() -> bool:
    """Whether this processor multiplies bfloat16 in hardware."""
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16") or known.get("bf16"))
