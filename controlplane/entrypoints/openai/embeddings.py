"""``/v1/embeddings``: from the JSON of a request to checked values, and from vectors to an answer.

``input`` is a text, token ids, or a list of either; each becomes one vector. Texts are encoded with
the model's own tokenizer; token ids are taken as that tokenizer's, as they are. (LangChain sends
those of another tokenizer unless it is told ``check_embedding_ctx_length=False``.)

Inputs are dealt out to orders, so that the vectors of one order fit into one message of the bus:
70 inputs of a model that takes 256 tokens are 24, 23 and 23. With ``dimensions`` a vector is cut
and made of length 1 again, which models that were trained for it (Matryoshka) allow. An answer's
numbers are floats, or with ``encoding_format: base64`` the bytes of little-endian float32, which is
what openai-python asks for.
"""

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from controlplane.application.call import Call, Part
from controlplane.application.inference import SamplingOptions
from controlplane.application.refused import Refused
from controlplane.domain.version_spec import MAX_INPUTS
from controlplane.entrypoints.openai.parameters import (
    Fields,
    Parameters,
    checked,
    model_name,
    prompts_up_to,
    service_tier,
    user_name,
    whole,
)

INPUTS_AT_ONCE = 32  # in one order: 32 vectors of 4096 numbers are half a megabyte
TOKENS_AT_ONCE = 65_536  # at most; ids take up to five bytes each
FORMATS = ("float", "base64")


def embedding_parameters(body: Fields) -> Parameters:
    """Check an embeddings request; raises Refused with ``param``."""
    fields = checked(body, _EMBEDDING, "input")
    fields["prompts"] = fields.pop("input")
    fields["latency_class"] = fields.pop("service_tier", "")
    return Parameters(sampling=SamplingOptions(), embeds=True, **fields)


def _format(name: str, value: Any) -> str:
    if value not in FORMATS:
        raise Refused("invalid_parameter", f"{name} is float or base64.", name)
    return str(value)


_EMBEDDING = {
    "model": model_name,
    "input": prompts_up_to(MAX_INPUTS),
    "encoding_format": _format,
    "dimensions": whole(1, 1 << 16),
    "user": user_name,
    "service_tier": service_tier,
}


def dealt(num_inputs: int, max_tokens: int) -> list[int]:
    """How many inputs of up to ``max_tokens`` each order has: as even as can be.

    >>> dealt(70, 256)
    [24, 23, 23]
    """
    at_once = max(1, min(INPUTS_AT_ONCE, TOKENS_AT_ONCE // max_tokens))
    num_orders = -(-num_inputs // at_once)
    each, more = divmod(num_inputs, num_orders)
    return [each + 1] * more + [each] * (num_orders - more)


class Vectors:
    """Gathers the vectors of all inputs into one response body."""

    def __init__(self, call: Call, parameters: Parameters) -> None:
        self._parameters = parameters
        self._of_part: list[tuple[bytes, ...]] = [()] * len(call.parts)

    def add(self, batch: Sequence[tuple[Part, Any]]) -> None:
        for part, delta in batch:
            if delta.embeddings:
                self._of_part[part.index] = delta.embeddings

    def body(self, call: Call) -> bytes:
        """The whole answer; raises Refused if a node gave something else than was asked for."""
        job = call.job
        vectors = [vector for part in self._of_part for vector in part]
        if len(vectors) != len(self._parameters.prompts):
            raise Refused("engine_error", "The engine gave another number of vectors.")
        data = [
            {"object": "embedding", "index": index, "embedding": self._shown(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": job.num_prompt_tokens, "total_tokens": job.num_prompt_tokens}
        answer = {"object": "list", "data": data, "model": job.requested_model, "usage": usage}
        return msgspec.json.encode(answer)

    def _shown(self, vector: bytes) -> str | list[float]:
        numbers = shortened(np.frombuffer(vector, "<f4"), self._parameters.dimensions)
        if self._parameters.encoding_format == "base64":
            return b64encode(numbers.tobytes()).decode()
        return numbers.tolist()


def shortened(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first ``dimensions`` numbers, of length 1 again: (3, 4, 12) in two is (0.6, 0.8)."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions].astype("<f8")
    length = float(np.linalg.norm(kept))
    return (kept / length if length else kept).astype("<f4")
