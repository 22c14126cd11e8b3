"""Embedding models that are computed: the torch backend's other half.

An encoder has no KV cache, so its memory is weights and the activations of a step (``memory``).
Both are checked against the replica's budget before anything is read, and measured afterwards.
"""

import msgspec

from gpuagent.agent.backends.base import LoadedModel, LoadError
from gpuagent.agent.backends.fetching import to_wire
from gpuagent.agent.backends.loading import LOADING, warning_of
from gpuagent.agent.backends.memory import check_encoder
from gpuagent.agent.backends.peak import PeakMemory
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.agent.model_store import tokenizer_bundle
from gpuagent.agent.model_store.store import LocalModel
from gpuagent.engine.encoder import load_encoder
from gpuagent.engine.precision import Precision
from gpuagent.models.encoder_config import read_encoder_config
from gpuagent.wire.messages import ReplicaSpec


def check_formats(formats: Precision) -> None:
    """Raise LoadError ``quantization_unsupported`` for what encoders do not have."""
    if formats.quantization != "none":
        text = f"{formats.quantization} is for models that generate; encoders take none or bf16"
        raise LoadError("quantization_unsupported", text)


def load(
    spec: ReplicaSpec, config: WorkerConfig, local: LocalModel, formats: Precision
) -> LoadedModel:
    """Load a fetched encoder; raises LoadError of the backends or of the models."""
    device = config.device.kind
    bundle = tokenizer_bundle.read_tokenizer_bundle(local.path)
    shape = read_encoder_config(local.path)
    check_encoder(spec, shape, formats.dtype)
    max_length = min(spec.max_model_len, bundle.max_model_len, shape.max_length)
    with LOADING, PeakMemory(device) as peak:
        engine = load_encoder(
            local.path,
            dtype=formats.dtype,
            device=device,
            max_length=max_length,
            max_batch_tokens=spec.max_batch_tokens,
            max_num_inputs=spec.max_batch,
        )
    weights = engine.stats().weights_bytes
    workspace = shape.workspace_bytes(formats.dtype, max(spec.max_batch_tokens, max_length))
    model_bytes = max(peak.num_bytes, weights + workspace)
    wire = to_wire(spec, local, bundle, max_length)
    return LoadedModel(
        engine=engine,
        bundle=msgspec.structs.replace(wire, dimensions=shape.hidden_size),
        sha256=local.sha256,
        max_model_len=max_length,
        peak_bytes=model_bytes,
        workspace_bytes=model_bytes - weights,
        warning=warning_of(formats, device),
    )
