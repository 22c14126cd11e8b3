"""What backends of real models share: verified files from the model store, and their tokenizer."""

from pathlib import Path

from gpuagent.agent.backends.base import Progress
from gpuagent.agent.ipc import WorkerConfig
from gpuagent.agent.model_store import tokenizer_bundle
from gpuagent.agent.model_store.store import LocalModel, ModelStore
from gpuagent.wire.messages import ReplicaSpec, TokenizerBundle


def fetch(
    source: str, sha256: str, config: WorkerConfig, dtype: str, progress: Progress
) -> LocalModel:
    """The model's folder, its files verified; raises ModelStoreError."""
    store = ModelStore(Path(config.model_cache), tuple(map(Path, config.file_roots)))

    def report(stage: str, fraction: float) -> None:
        progress("loading" if stage == "verify" else "downloading", stage, fraction)

    return store.ensure(source, sha256 or None, report, dtype)


def to_wire(
    spec: ReplicaSpec, local: LocalModel, found: tokenizer_bundle.TokenizerBundle, max_len: int
) -> TokenizerBundle:
    """The folder's tokenizer as gateways are given it."""
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
