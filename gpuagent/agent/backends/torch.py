"""Models that are computed: fetched by the model store, run by the torch engine.

The memory budget of the replica is split before anything is allocated: weights and the largest
step's activations are estimated from the model's shape, the rest becomes the KV pool, up to what
``max_batch`` sequences of ``max_model_len`` can use. What does not fit is refused with
``insufficient_memory`` instead of being tried.
"""

import resource
from pathlib import Path

import torch

from gpuagent.agent.backends.base import LoadedModel, LoadError, Progress
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.agent.model_store import tokenizer_bundle
from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.store import LocalModel, ModelStore
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.scheduler import Policy
from gpuagent.models.config import ModelConfig, estimate_memory, read_config
from gpuagent.models.errors import LoadError as ModelError
from gpuagent.wire.messages import ReplicaSpec, TokenizerBundle

BLOCK_SIZE = 16
KINDS = {"none": "float32", "fp32": "float32", "bf16": "bfloat16", "int8": "float32"}


def load_torch(spec: ReplicaSpec, config: WorkerConfig, progress: Progress) -> LoadedModel:
    """Fetch, check and load a replica's model; raises LoadError."""
    torch.set_num_threads(config.threads)
    dtype = _dtype(spec, config)
    try:
        local = _fetch(spec, config, dtype, progress)
        progress("loading", "weights", 0.0)
        return _load(spec, config, local, dtype)
    except (ModelStoreError, ModelError) as error:
        raise LoadError(error.code, error.message) from error
    except torch.OutOfMemoryError as error:
        raise LoadError("out_of_memory", str(error)) from error
    except RuntimeError as error:
        if "memory" in str(error):  # the CPU allocator has no exception of its own
            raise LoadError("out_of_memory", str(error)) from error
        raise


def _dtype(spec: ReplicaSpec, config: WorkerConfig) -> str:
    """The number format of weights and cache. Full precision is for CPUs; GPUs halve it."""
    if spec.quantization not in KINDS:
        raise LoadError(
            "quantization_unsupported", f"{spec.quantization!r} is not in {list(KINDS)}"
        )
    if spec.tensor_parallel != 1:
        raise LoadError("tensor_parallel_unsupported", "one device per replica")
    is_gpu = config.device.kind == "cuda"
    return "bfloat16" if is_gpu and spec.quantization == "none" else KINDS[spec.quantization]


def _fetch(spec: ReplicaSpec, config: WorkerConfig, dtype: str, progress: Progress) -> LocalModel:
    store = ModelStore(Path(config.model_cache), tuple(map(Path, config.file_roots)))

    def report(stage: str, fraction: float) -> None:
        progress("loading" if stage == "verify" else "downloading", stage, fraction)

    return store.ensure(spec.source, spec.sha256 or None, report, dtype)


def _load(spec: ReplicaSpec, config: WorkerConfig, local: LocalModel, dtype: str) -> LoadedModel:
    device = config.device.kind
    bundle = tokenizer_bundle.read_tokenizer_bundle(local.path)
    max_model_len = min(spec.max_model_len, bundle.max_model_len)
    before = _peak_bytes(device)
    engine = TorchEngine.load(
        local.path,
        dtype=dtype,
        kv_bytes=kv_budget(read_config(local.path), dtype, spec, max_model_len),
        block_size=BLOCK_SIZE,
        max_batch_tokens=max(spec.max_batch_tokens, spec.max_batch),
        max_num_seqs=spec.max_batch,
        max_model_len=max_model_len,
        device=device,
        policy=Policy(spec.policy),
        quantization="int8" if spec.quantization == "int8" else "none",
    )
    stats = engine.stats()
    measured = _peak_bytes(device) - before
    return LoadedModel(
        engine=engine,
        bundle=_to_wire(spec, local, bundle, max_model_len),
        sha256=local.sha256,
        max_model_len=min(max_model_len, stats.num_blocks * stats.block_size),
        peak_bytes=max(measured, stats.weights_bytes + stats.kv_bytes),
    )


def kv_budget(config: ModelConfig, dtype: str, spec: ReplicaSpec, max_model_len: int) -> int:
    """Bytes of the KV pool: what the replica's budget leaves, at most what can be used.

    Raises LoadError ``insufficient_memory`` if not even one sequence of full length would fit.
    """
    fixed = estimate_memory(config, dtype, kv_bytes=0, max_batch_tokens=spec.max_batch_tokens)
    per_sequence = (max_model_len + BLOCK_SIZE) * config.kv_bytes_per_token(dtype)
    left = spec.memory_bytes - fixed
    if left < per_sequence:
        raise LoadError(
            "insufficient_memory",
            f"{fixed} bytes for weights and activations and {per_sequence} for one sequence's "
            f"cache are more than the budget of {spec.memory_bytes}",
        )
    return min(left, spec.max_batch * per_sequence)


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _to_wire(
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
