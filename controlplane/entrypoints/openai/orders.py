"""From a principal and checked parameters to a ``Job``: resolve, encode, fill in the limits."""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from itertools import chain, islice
from typing import NamedTuple

from controlplane.application.fleet_state import FleetState
from controlplane.application.hold import NotLoadedYet
from controlplane.application.inference import Job
from controlplane.application.refused import Refused
from controlplane.dispatch import refusals
from controlplane.dispatch.admit import Asked, context_length, output_limit
from controlplane.dispatch.resolve import Caller, Resolved, resolve
from controlplane.entrypoints.openai.capturing import Capturing
from controlplane.entrypoints.openai.embeddings import dealt
from controlplane.entrypoints.openai.encoding import Encoder, Encoders
from controlplane.entrypoints.openai.parameters import SERVICE_TIERS, Parameters
from controlplane.entrypoints.openai.principals import TenantPrincipal

BEST_CLASS = {"free": "standard"}  # tiers whose best class is not realtime
IDS_AT_ONCE = 256
_ENDPOINTS = {"generate": "/v1/chat/completions", "embed": "/v1/embeddings"}
_fresh_ids: list[str] = []


class Encoded(NamedTuple):
    """Prompts, what each may produce, and of a request that embeds where its inputs end."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    input_lengths: tuple[tuple[int, ...], ...] = ()


class OrderDesk:
    """Makes jobs. ``secret`` keys the tenants' cache salts; nothing a client sends enters them.
    ``weights``: of a tenant among others of its latency class, by tier."""

    def __init__(
        self,
        state: FleetState,
        encoders: Encoders,
        monotonic: Callable[[], float],
        secret: bytes,
        weights: Mapping[str, float],
        capturing: Capturing,
    ) -> None:
        self._state, self._encoders, self._monotonic = state, encoders, monotonic
        self._weights, self._capturing = weights, capturing
        self._salt = lru_cache(4096)(
            lambda tenant_id: hmac.digest(secret, b"cache\0" + tenant_id.encode(), hashlib.sha256)
        )

    async def job(
        self,
        request_id: str,
        principal: TenantPrincipal,
        endpoint: str,
        parameters: Parameters,
        latency_class: str,
    ) -> Job:
        """Raises Refused."""
        began = self._monotonic()
        tenant = principal.tenant
        user = parameters.user or principal.subject
        found = self.resolve(parameters.model, principal.caller, user, request_id)
        _check_task(parameters, found)
        try:
            encode, bound = None, 0
            encoded = await self._encoded(parameters, found)
        except NotLoadedYet:
            encode, bound = self._later(parameters, found), _bound(parameters, found)
            encoded = _empty(parameters, found)
        capture = None
        if tenant.captures_text:
            capture = await self._capturing.begin(tenant, endpoint, parameters)
        return Job(
            request_id=request_id,
            tenant_id=tenant.tenant_id,
            subject=principal.subject,
            end_user=parameters.user or "",
            tier=tenant.tier,
            endpoint=endpoint,
            requested_model=parameters.model,
            route=found.route,
            arm=found.arm,
            version_id=found.version_id,
            latency_class=_class_of(latency_class or parameters.latency_class, tenant.tier),
            price=self._state.catalog.price(found.version_id),
            prompts=encoded.prompts,
            num_choices=parameters.n,
            max_tokens=encoded.max_tokens,
            sampling=parameters.sampling,
            cache_salt=self._salt(tenant.tenant_id),
            began=began,
            weight=self._weights.get(tenant.tier, 1.0),
            priority=found.spec.priority,
            capture=capture,
            max_prompt_tokens=bound,
            encode=encode,
            input_lengths=encoded.input_lengths,
        )

    async def _encoded(self, parameters: Parameters, found: Resolved) -> Encoded:
        """Prompts and what each may produce; raises Refused, NotLoadedYet without a tokenizer."""
        encoder = await self._encoders.get(found.version_id)
        if parameters.embeds:
            return await _encode_inputs(encoder, parameters, found)
        encoder.check_bias(parameters.sampling.logit_bias)
        prompts = await _encode(encoder, parameters, found)
        limits = tuple(_limit(encoder, parameters, found, prompt) for prompt in prompts)
        return Encoded(prompts, limits)

    def _later(self, parameters: Parameters, found: Resolved) -> Callable[[Job], Awaitable[None]]:
        async def encode(job: Job) -> None:
            encoded = await self._encoded(parameters, found)
            job.prompts, job.max_tokens = encoded.prompts, encoded.max_tokens
            job.input_lengths = encoded.input_lengths

        return encode

    def resolve(self, name: str, caller: Caller, user: str, request_id: str) -> Resolved:
        try:
            return resolve(self._state.catalog, name, caller, user, request_id)
        except refusals.DispatchError as error:
            raise Refused("model_not_found", error.message, "model") from error

    async def context_length(self, found: Resolved) -> int:
        """What a request to the version may have in tokens, as far as it is known."""
        ready = self._state.num_ready(found.version_id) > 0
        return context_length(found.spec, await self._encoders.context(found.version_id, ready))


def new_request_id() -> str:
    if not _fresh_ids:  # each call to urandom gives up the interpreter lock, and may wait for it
        text = os.urandom(16 * IDS_AT_ONCE).hex()
        _fresh_ids.extend(f"req-{text[i : i + 32]}" for i in range(0, len(text), 32))
    return _fresh_ids.pop()


def _check_task(parameters: Parameters, found: Resolved) -> None:
    """Raise Refused for what the model does not do, and for more inputs than it takes."""
    spec = found.spec
    if parameters.embeds != (spec.task == "embed"):
        does = "embeds" if spec.task == "embed" else "generates"
        text = f"'{parameters.model}' {does}: use {_ENDPOINTS[spec.task]}."
        raise Refused("model_task_mismatch", text, "model")
    if parameters.embeds and len(parameters.prompts) > spec.max_inputs:
        text = f"input has at most {spec.max_inputs} entries for this model."
        raise Refused("invalid_parameter", text, "input")


async def _encode_inputs(encoder: Encoder, parameters: Parameters, found: Resolved) -> Encoded:
    encoder.check_dimensions(parameters.dimensions)
    longest = found.spec.max_prompt_tokens
    limit = min(longest, encoder.max_model_len or longest)
    inputs = iter(await encoder.inputs(parameters.prompts, limit))
    orders = [list(islice(inputs, num)) for num in dealt(len(parameters.prompts), longest)]
    return Encoded(
        tuple(tuple(chain.from_iterable(order)) for order in orders),
        (0,) * len(orders),
        tuple(tuple(map(len, order)) for order in orders),
    )


def _bound(parameters: Parameters, found: Resolved) -> int:
    """Tokens that all prompts may have together, of a version whose tokenizer is unknown."""
    num = 1 if parameters.messages else len(parameters.prompts)
    return num * found.spec.max_prompt_tokens


def _empty(parameters: Parameters, found: Resolved) -> Encoded:
    """Of a version whose tokenizer is unknown: no prompt yet, and the most each may produce."""
    if parameters.embeds:
        counts = dealt(len(parameters.prompts), found.spec.max_prompt_tokens)
        lengths = tuple((0,) * num for num in counts)
        return Encoded(((),) * len(counts), (0,) * len(counts), lengths)
    asked = Asked(1, parameters.max_tokens, parameters.n)
    try:
        most = output_limit(found.spec, asked, found.spec.max_model_len)
    except refusals.InvalidRequest as error:
        raise Refused(error.code, error.message, error.param) from error
    num = 1 if parameters.messages else len(parameters.prompts)
    return Encoded(((),) * num, (most,) * num)


async def _encode(
    encoder: Encoder, parameters: Parameters, found: Resolved
) -> tuple[tuple[int, ...], ...]:
    limit = context_length(found.spec, encoder.max_model_len)
    if parameters.messages:
        return (await encoder.chat(parameters.messages, limit),)
    return tuple([await encoder.prompt(prompt, limit) for prompt in parameters.prompts])


def _limit(
    encoder: Encoder, parameters: Parameters, found: Resolved, prompt: tuple[int, ...]
) -> int:
    asked = Asked(len(prompt), parameters.max_tokens, parameters.n)
    try:
        return output_limit(found.spec, asked, encoder.max_model_len)
    except refusals.InvalidRequest as error:
        param = "prompt" if error.param == "messages" and parameters.prompts else error.param
        raise Refused(error.code, error.message, param) from error


def header_class(value: bytes | None) -> str:
    """The latency class of an ``X-Latency-Class`` header, "" without one; raises Refused."""
    if value is None:
        return ""
    name = value.decode("latin-1").strip().lower()
    if name not in SERVICE_TIERS:
        raise Refused(
            "invalid_parameter",
            "X-Latency-Class is realtime, standard or batch.",
            "X-Latency-Class",
        )
    return SERVICE_TIERS[name]


def _class_of(asked: str, tier: str) -> str:
    """What was asked, or standard; no better than the tier allows."""
    wanted = asked or "standard"
    return BEST_CLASS.get(tier, wanted) if wanted == "realtime" else wanted
