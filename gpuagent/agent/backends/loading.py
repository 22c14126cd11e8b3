"""What loading a decoder and loading an encoder have in common."""

import logging
import threading

import torch

from gpuagent.agent.model_store import tokenizer_bundle
from gpuagent.agent.model_store.store import LocalModel
from gpuagent.engine.precision import Precision
from gpuagent.wire.messages import ReplicaSpec, TokenizerBundle

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


def to_wire(
    spec: ReplicaSpec, local: LocalModel, found: tokenizer_bundle.TokenizerBundle, max_len: int
) -> TokenizerBundle:
    return TokenizerBundle(
        version_id=spec.version_id,
        tokenizer_json=found.tokenizer_json,
        chat_template=found.chat_template,
        bos_token=found.special_tokens.get("bos_token", ""),
        eos_token=found.special_tokens.get("eos_token", ""),
        eos_token_ids=found.eos_token_id,
        vocab_size=found.vocab_size,
        max_model_len=max_len,
        sha256=local.sha256,
    )
