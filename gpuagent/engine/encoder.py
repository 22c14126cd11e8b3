"""A BERT encoder as the embedding engine's `Embedder`: torch in, bytes out.

engine = load_encoder(path)
engine.add(GenerationRequest("r1", (101, 7592, 102), SamplingParams(0), input_lengths=(3,)))
(output,) = engine.step()
output.embeddings       # 1 vector: 384 floats of 4 bytes, little-endian, its length is 1
"""

from pathlib import Path

import torch

from gpuagent.engine import weights_swap
from gpuagent.engine.detokenizer import load_tokenizer
from gpuagent.engine.embedding import EmbeddingEngine, Inputs
from gpuagent.engine.executors import DTYPES
from gpuagent.models.bert import BertEncoder

CLS_LIKE = 0  # any token will do for a step whose result nobody wants


class TorchEmbedder:
    """Computes vectors with torch, on the model's device."""

    def __init__(self, model: BertEncoder) -> None:
        self.model = model
        self._is_apart = model.device != "cpu"  # else its memory is the host's, and stays
        self.weights_bytes = model.weights_bytes

    def embed(self, inputs: Inputs) -> list[bytes | None]:
        """See `gpuagent.engine.embedding.Embedder`."""
        with torch.inference_mode():
            vectors = self.model.embed(inputs).cpu()
        sound = torch.isfinite(vectors).all(1).tolist()
        rows = vectors.numpy().astype("<f4", copy=False)
        return [row.tobytes() if ok else None for row, ok in zip(rows, sound, strict=True)]

    def park(self) -> int:
        """The weights into host memory, where the device has its own."""
        return weights_swap.offload(self.model) if self._is_apart else 0

    def unpark(self) -> int:
        """And back."""
        return weights_swap.restore(self.model, self.model.device) if self._is_apart else 0


def load_encoder(
    path: Path | str,
    dtype: str = "float32",
    device: str = "cpu",
    max_length: int | None = None,
    max_batch_tokens: int = 512,
    max_num_inputs: int = 64,
) -> EmbeddingEngine:
    """Open a safetensors folder; raises LoadError. `max_length` is at most what the model knows.

    A step of full size is computed once, so that its memory is there, and seen, from the start.
    """
    folder = Path(path)
    model = BertEncoder.load(folder, DTYPES[dtype], device)
    load_tokenizer(folder, model.config.vocab_size)  # must fit, though only gateways use it
    length = min(max_length or model.config.max_length, model.config.max_length)
    embedder = TorchEmbedder(model)
    num_full = max(1, max_batch_tokens // length)
    embedder.embed([(CLS_LIKE,) * length] * num_full)
    sizes = (length, max_batch_tokens, max_num_inputs)
    return EmbeddingEngine(embedder, model.config.vocab_size, *sizes)
