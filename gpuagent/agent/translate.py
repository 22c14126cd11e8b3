"""Between the wire's words and the engine's."""

import msgspec

from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from gpuagent.engine.request import TokenLogprob as EngineLogprob
from gpuagent.wire.messages import Generate, TokenLogprob, TopLogprob


def to_engine(request: Generate) -> GenerationRequest:
    """The engine's form of a wire request; raises ValueError for an unknown latency class."""
    wire = msgspec.structs.asdict(request.sampling)
    wire.pop("v")
    wire["logit_bias"] = tuple(request.sampling.logit_bias.items())
    return GenerationRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=SamplingParams(**wire),
        latency_class=LatencyClass(request.latency_class),
        cache_salt=request.cache_salt,
        weight=request.weight,
        input_lengths=request.input_lengths,
    )


def logprob(entry: EngineLogprob) -> TokenLogprob:
    """The wire's form of a token's log probability."""
    top = tuple(TopLogprob(*row) for row in entry.top)
    return TokenLogprob(entry.token_id, entry.token, entry.logprob, top)
