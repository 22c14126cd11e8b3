"""Choose what computes the steps: the native kernels where they fit, torch elsewhere.

The choice is made once, at load, and reported in `EngineStats.executor`; the reason for torch
is logged. `ENGINE_KERNELS=torch` makes it by hand.
"""

import logging

import torch

from gpuagent.engine.kv_tensors import KVTensors
from gpuagent.engine.model_runner import Executor, TorchExecutor
from gpuagent.engine.native.build import KernelsUnavailable, kernels
from gpuagent.engine.native.executor import NativeExecutor, check_supported
from gpuagent.engine.native.kv import kv_bytes_per_token
from gpuagent.engine.scheduler import SchedulerConfig
from gpuagent.models.config import ModelConfig
from gpuagent.models.llama import LlamaModel

QUANTIZATIONS = ("none", "int8")
logger = logging.getLogger(__name__)


def make_executor(
    model: LlamaModel,
    scheduling: SchedulerConfig,
    dtype: torch.dtype,
    device: str,
    quantization: str = "none",
) -> Executor:
    """The executor for a loaded model. `int8` quantises weights, activations and the cache on
    the native kernels, only weights in torch; raises ValueError for another quantization."""
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is not in {QUANTIZATIONS}")
    is_int8, num_blocks = quantization == "int8", scheduling.num_blocks
    reason = reason_for_torch(model.config, scheduling.block_size, dtype, device)
    if reason is None:
        return NativeExecutor(model, num_blocks, scheduling.max_batch_tokens, is_int8)
    logger.info("computing with torch, not the native kernels: %s", reason)
    if is_int8:
        model.quantise()
    kv = KVTensors(model.config, num_blocks, scheduling.block_size, dtype, device)
    return TorchExecutor(model, kv, model.weights_bytes)


def reason_for_torch(
    config: ModelConfig, block_size: int, dtype: torch.dtype, device: str
) -> str | None:
    """Why the native kernels cannot be used; None if they can."""
    try:
        if dtype is not torch.float32:
            raise KernelsUnavailable(f"they compute in float32, not {dtype}")
        check_supported(config, block_size, device)
        kernels()
    except KernelsUnavailable as reason:
        return str(reason)
    return None


def block_bytes(
    config: ModelConfig, block_size: int, dtype: torch.dtype, device: str, quantization: str
) -> int:
    """Bytes of one KV block of the executor that `make_executor` would make."""
    if reason_for_torch(config, block_size, dtype, device) is None:
        return block_size * kv_bytes_per_token(config, is_int8=quantization == "int8")
    return (
        block_size * 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    )
