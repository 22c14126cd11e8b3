"""One generation as a stream of vLLM's: the order for it, and what each event adds to it.

The rules of every engine (``gpuagent.engine.request``) are kept here, token by token, whatever vLLM
itself calls the end. Example, stop token 2, stop string "END", three events::

    token_ids [40, 41]                        ((40, 41), "the ")           "E" may begin the string
    token_ids [42]                            ((42,), "", "stop")          "END" is complete
    token_ids [43, 2], finish_reason "stop"   held: ((43,), "ok", "stop")  2 is not delivered
    usage: completion_tokens 2                what was held                as many as have arrived
"""

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpuagent.agent.backends.vllm_client import Choice, Usage
from gpuagent.agent.backends.vllm_server import MODEL
from gpuagent.engine.detokenizer import Detokenizer
from gpuagent.engine.request import (
    GenerationRequest,
    LatencyClass,
    RequestOutput,
    TokenLogprob,
)

PRIORITY = {LatencyClass.REALTIME: 0, LatencyClass.STANDARD: 1, LatencyClass.BATCH: 2}
ENDS = {"length": "length", "stop": "stop"}


class Corrupt(Exception):
    """What vLLM says cannot be."""


@dataclass(slots=True)
class Stream:
    """One stream and what was delivered of it; ``num_raw`` are tokens as vLLM counts them.

    ``limit`` are the output tokens it may have, those another replica sent included; ``held`` is
    the last output, which waits for vLLM's own count, so that fewer are delivered than there are.
    """

    request: GenerationRequest
    detokenizer: Detokenizer
    stop_ids: frozenset[int]
    limit: int
    num_output: int = 0
    num_delivered: int = 0
    num_raw: int = 0
    num_cached: int = 0
    reason: str | None = None
    held: RequestOutput | None = None

    def resume(self, sent: tuple[int, ...], num_cached: int) -> None:
        """Begin after tokens that another replica sent, text and all."""
        for token in sent:
            self.detokenizer.push(token)
        self.num_output = self.num_delivered = len(sent)
        self.num_cached = num_cached
        if self.detokenizer.stopped or len(sent) >= self.limit:
            self.reason = "stop" if self.detokenizer.stopped else "length"

    def take(self, choice: Choice) -> RequestOutput | None:
        """What an event adds, None if that is nothing to deliver yet. Raises Corrupt."""
        index = self.num_output
        tokens, text = self._accept(choice.token_ids or [])
        if choice.finish_reason and self.reason is None:
            self.reason = ENDS.get(choice.finish_reason)
            if self.reason is None:
                raise Corrupt(f"it ended by {choice.finish_reason:.40}")
        if self.reason:
            text += self.detokenizer.finish()
            self.reason = "stop" if self.detokenizer.stopped else self.reason
        entries = self._logprobs(choice)[: len(tokens)]
        output = self._output(index, tokens, text, entries, self.reason)
        if self.reason and choice.finish_reason:
            self.held = output
            return None
        self.num_delivered = self.num_output
        return output if tokens or text or self.reason else None

    def _accept(self, token_ids: Iterable[int]) -> tuple[tuple[int, ...], str]:
        """The tokens up to the one that ends it, and the text that they allow."""
        tokens: list[int] = []
        text = ""
        for token in token_ids:
            self.num_raw += 1
            if self.reason:
                continue  # computed before vLLM knew
            if token in self.stop_ids:
                self.reason = "stop"
                continue
            tokens.append(token)
            text += self.detokenizer.push(token)
            self.num_output += 1
            if self.detokenizer.stopped:
                self.reason = "stop"
            elif self.num_output >= self.limit:
                self.reason = "length"
        return tuple(tokens), text

    def counted(self, usage: Usage) -> RequestOutput:
        """The last output, now that vLLM has counted; raises Corrupt if it is not what arrived."""
        if self.held is None or usage.completion_tokens != self.num_raw:
            raise Corrupt(f"{usage.completion_tokens} tokens were sent, {self.num_raw} arrived")
        if usage.prompt_tokens == len(self.request.prompt_token_ids):
            self.num_cached = usage.num_cached  # else it is what the first replica found
        held = self.held
        return self._output(
            held.index, held.token_ids, held.text, held.logprobs, held.finish_reason
        )

    def ending(self, reason: str, code: str | None = None, error: str = "") -> RequestOutput:
        """An end without a token, after what was delivered."""
        text = "" if reason == "error" else self.detokenizer.finish()
        return self._output(self.num_delivered, (), text, (), reason, code, error)

    def _output(
        self,
        index: int,
        tokens: tuple[int, ...] = (),
        text: str = "",
        entries: tuple[TokenLogprob, ...] = (),
        reason: str | None = None,
        code: str | None = None,
        error: str = "",
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            index=index,
            token_ids=tokens,
            text=text,
            logprobs=entries,
            finish_reason=reason,
            error_code=code,
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.num_cached,
            num_output_tokens=index + len(tokens),
            error_type=error,
        )

    # --- log probabilities ------------------------------------------------------------------
    def _logprobs(self, choice: Choice) -> tuple[TokenLogprob, ...]:
        num_top, said = self.request.sampling.logprobs, choice.logprobs
        if num_top is None or said is None:
            return ()
        rows = zip(said.tokens, said.token_logprobs, said.top_logprobs, strict=False)
        return tuple(self._logprob(*row, num_top) for row in rows)

    def _logprob(
        self, name: str, logprob: float, top: dict[str, float], num_top: int
    ) -> TokenLogprob:
        """vLLM adds the chosen token to the best ones, which are all that is asked for."""
        best = sorted(top.items(), key=lambda entry: -entry[1])[:num_top]
        rows = tuple((*self._named(other), value) for other, value in best)
        return TokenLogprob(*self._named(name), logprob, rows)

    def _named(self, name: str) -> tuple[int, str]:
        """``token_id:42`` as 42 and its text."""
        number = name.removeprefix("token_id:")
        if not number.isdigit():
            raise Corrupt("a log probability of no token")
        return int(number), self.detokenizer.token_text(int(number))

    # --- the order --------------------------------------------------------------------------
    def body(self, sent: tuple[int, ...] = ()) -> dict[str, Any]:
        """The order to vLLM, every parameter said: none of its defaults counts."""
        request, sampling = self.request, self.request.sampling
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": [*request.prompt_token_ids, *sent],
            "max_tokens": self.limit - len(sent),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "priority": PRIORITY[request.latency_class],
            "ignore_eos": True,  # it is one of the stop tokens, if it counts
            "stop_token_ids": sorted(self.stop_ids),
            "stop": list(sampling.stop),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
        }
        return body | self._optional()

    def _optional(self) -> dict[str, Any]:
        request, sampling = self.request, self.request.sampling
        body: dict[str, Any] = {}
        if sampling.seed is not None:
            body["seed"] = sampling.seed % (1 << 63)
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.logprobs is not None:
            body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
        if request.cache_salt:
            body["cache_salt"] = urlsafe_b64encode(request.cache_salt).decode()
        return body
