"""Models that are computed: fetched by the model store, run by the torch engine.

The memory budget of the replica is divided before anything is allocated (``memory``). What does
not fit is refused with ``insufficient_memory`` instead of being tried, and what a version asks for
and this device or checkpoint does not have, with a code that names it.
"""

import socket

import torch

from gpuagent.agent.backends import encoder
from gpuagent.agent.backends.base import LoadedModel, LoadError, Progress
from gpuagent.agent.backends.fetching import fetch, to_wire
from gpuagent.agent.backends.loading import LOADING, warning_of
from gpuagent.agent.backends.memory import BLOCK_SIZE, Division, divide, divide_among
from gpuagent.agent.backends.peak import PeakMemory
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.agent.model_store import tokenizer_bundle
from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.store import LocalModel
from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.lines import Line
from gpuagent.engine.precision import Precision, check_checkpoint, precision
from gpuagent.engine.ranks import Rank, check_supported
from gpuagent.engine.scheduler import Policy
from gpuagent.models.config import read_config
from gpuagent.models.encoder_config import is_encoder
from gpuagent.models.errors import LoadError as ModelError
from gpuagent.wire.messages import ReplicaSpec


def load_torch(spec: ReplicaSpec, config: WorkerConfig, progress: Progress) -> LoadedModel:
    """Fetch, check and load a replica's model for this worker's role; raises LoadError."""
    torch.set_num_threads(config.threads)
    place = _place(spec, config)
    try:
        formats = precision(spec.quantization, spec.kv_cache_dtype, config.device.kind)
        if spec.task == "embed":
            encoder.check_formats(formats)
        local = fetch(spec.source, spec.sha256, config, formats.dtype, progress)
        draft = None
        if spec.speculation == "draft":
            draft = fetch(spec.draft_model, "", config, formats.dtype, progress)
        progress("loading", "weights", 0.0)
        if spec.task == "embed":
            return encoder.load(spec, config, local, formats)
        if is_encoder(local.path):
            raise LoadError("checkpoint_mismatch", "the checkpoint is an encoder: task is embed")
        loaded = _load(spec, config, local, draft, formats, place)
        if place and config.group:
            progress("loading", "group", 0.0)
            place.connect(config.group.start_s)
        return loaded
    except (ModelStoreError, ModelError) as error:
        raise LoadError(error.code, error.message) from error
    except torch.OutOfMemoryError as error:
        raise LoadError("out_of_memory", str(error)) from error
    except RuntimeError as error:
        if "memory" in str(error):  # the CPU allocator has no exception of its own
            raise LoadError("out_of_memory", str(error)) from error
        raise


def _place(spec: ReplicaSpec, config: WorkerConfig) -> Rank | None:
    """This worker's place in the replica's group; None if the replica has one device."""
    size = config.group.size if config.group else 1
    if spec.tensor_parallel != size:
        text = f"{spec.tensor_parallel} devices are wanted, and {size} workers were started"
        raise LoadError("tensor_parallel_unsupported", text)
    if config.group is None:
        return None
    group = config.group
    lines = [Line(socket.socket(fileno=each)) for each in group.lines]
    return Rank(group.rank, size, lines, config.device.kind, group.interface)


def _load(
    spec: ReplicaSpec,
    config: WorkerConfig,
    local: LocalModel,
    draft: LocalModel | None,
    formats: Precision,
    place: Rank | None,
) -> LoadedModel:
    device = config.device.kind
    bundle = tokenizer_bundle.read_tokenizer_bundle(local.path)
    max_model_len = min(spec.max_model_len, bundle.max_model_len)
    shape, small = read_config(local.path), read_config(draft.path) if draft else None
    check_checkpoint(shape, formats.quantization)
    if place:
        check_supported(formats.quantization, spec.speculation, spec.swap_bytes)
        division = divide_among(place.shard.size, spec, shape, formats, max_model_len)
    else:
        division = divide(spec, shape, formats, max_model_len, small, config.role)
    with LOADING, PeakMemory(device) as peak:
        engine = _engine(spec, config, local, draft, formats, division, max_model_len, place)
    stats = engine.stats()
    model_bytes = max(peak.num_bytes, stats.weights_bytes)
    if device == "cuda" or place:  # the pool, cleared at once, is part of what was measured
        model_bytes = max(peak.num_bytes - stats.kv_bytes, stats.weights_bytes)
    return LoadedModel(
        engine=engine,
        bundle=to_wire(spec, local, bundle, max_model_len),
        sha256=local.sha256,
        max_model_len=min(max_model_len, stats.num_blocks * stats.block_size),
        peak_bytes=model_bytes + stats.kv_bytes + division.swap_bytes,
        workspace_bytes=model_bytes - stats.weights_bytes,
        warning=warning_of(formats, device),
        follower=place.follower(engine.executor) if place else None,
    )


def _engine(
    spec: ReplicaSpec,
    config: WorkerConfig,
    local: LocalModel,
    draft: LocalModel | None,
    formats: Precision,
    division: Division,
    max_model_len: int,
    place: Rank | None,
) -> TorchEngine:
    return TorchEngine.load(
        local.path,
        dtype=formats.dtype,
        num_blocks=division.num_blocks,
        kv_bytes=division.kv_bytes,
        block_size=BLOCK_SIZE,
        max_batch_tokens=max(spec.max_batch_tokens, spec.max_batch),
        max_num_seqs=spec.max_batch,
        max_model_len=max_model_len,
        device=config.device.kind,
        policy=Policy(spec.policy),
        quantization=formats.quantization,
        kv_cache_dtype=spec.kv_cache_dtype,
        swap_bytes=division.swap_bytes,
        speculation="none" if config.role == "prefill" else spec.speculation,  # it guesses nothing
        draft_path=draft.path if draft else None,
        kv_limit_bytes=division.kv_limit_bytes,
        rank=place,
    )
