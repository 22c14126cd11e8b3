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
from gpuagent.engine.precision import Precision
from gpuagent.engine.scheduler import SchedulerConfig
from gpuagent.models.config import ModelConfig
from gpuagent.models.grouped import GroupLinear
from gpuagent.models.llama import LlamaModel

logger = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_executor(
    model: LlamaModel,
    scheduling: SchedulerConfig,
    precision: Precision,
    device: str = "cpu",
    is_leased: bool = False,
) -> Executor:
    """The executor for a loaded model. `int8` quantises weights and activations on the native
    kernels, only weights in torch. A leased pool has memory where it is used (`shared_pool`)."""
    num_blocks, dtype = scheduling.num_blocks, DTYPES[precision.dtype]
    if precision.quantization == "int8-weight-only":
        model.quantise(GroupLinear.rounded)
    is_int8, is_int8_kv = precision.quantization == "int8", precision.kv_dtype == "int8"
    parts = (  # all ranks of a group choose alike: their sums must be of the same rows
        reason_for_torch(config, scheduling.block_size, dtype, device)
        for config in model.rank_configs
    )
    reason = next((each for each in parts if each), None)
    if reason is None:
        limit = scheduling.max_batch_tokens
        return NativeExecutor(model, num_blocks, limit, is_int8, is_int8_kv, is_leased)
    logger.info("computing with torch, not the native kernels: %s", reason)
    if is_int8:
        model.quantise()
    kv = KVTensors(
        model.config, num_blocks, scheduling.block_size, dtype, device, is_int8_kv, is_leased
    )
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
