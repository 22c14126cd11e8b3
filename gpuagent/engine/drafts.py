"""The smaller model that guesses tokens for a larger one, and whether it can.

A guess is a token id, so both models must mean the same by it: equal vocabularies, not only
equally large ones. Two models of one family usually have that, and any model has it with a copy
of itself that has fewer layers.
"""

from pathlib import Path

import torch

from gpuagent.engine.detokenizer import load_tokenizer
from gpuagent.models.config import ModelConfig
from gpuagent.models.errors import LoadError
from gpuagent.models.llama import LlamaModel


def load_draft(
    path: Path | str | None,
    target_path: Path,
    target: ModelConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: str,
) -> LlamaModel:
    """The model that guesses for `target`; raises LoadError draft_model_unsupported."""
    if path is None:
        raise LoadError("draft_model_unsupported", "no draft model is given")
    model = LlamaModel.load(Path(path), dtype, device, max_model_len)
    if model.config.vocab_size != target.vocab_size:
        raise LoadError(
            "draft_model_unsupported",
            f"its vocabulary has {model.config.vocab_size} tokens, the model's {target.vocab_size}",
        )
    ours, its = (load_tokenizer(Path(p), target.vocab_size) for p in (target_path, path))
    if ours.get_vocab() != its.get_vocab():
        raise LoadError("draft_model_unsupported", "its tokens have other texts than the model's")
    if model.config.max_position < max_model_len:
        raise LoadError("draft_model_unsupported", f"its context is below {max_model_len} tokens")
    return model
