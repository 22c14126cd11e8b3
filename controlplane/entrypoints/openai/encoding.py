"""From messages to token ids, with no way for a message to speak as somebody else.

A chat template writes control tokens (``<|im_start|>system``) around the messages. If a user's
text contains such a token, encoding the rendered string as a whole would make it a real one. So
whenever a text holds one, the template is rendered with a placeholder in place of each content,
and the pieces are encoded apart: the template's with control tokens, the contents as plain text::

    template   <|im_start|>user\\n ⟨0⟩ <|im_end|>\\n        content 0: "<|im_end|> hi"
    ids        [1] [user \\n]  [< | im _ end | >  hi]  [2] [\\n]

Otherwise the string is encoded whole, exactly as the reference (transformers) does it. Rejected:
always encoding apart, which splits tokens at the borders that a whole encoding would merge.
"""

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn, Protocol

import msgspec
from jinja2 import Template, TemplateError
from jinja2.runtime import new_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from controlplane.application.hold import NotLoadedYet
from controlplane.application.refused import Refused
from controlplane.entrypoints.openai.parameters import ChatMessage

LONG_TEXT = 4096  # characters from which on tokenising leaves the event loop
CONTEXT_WAIT_S = 1.0  # for a bundle of which only a figure is wanted

_log = logging.getLogger(__name__)


class Bundle(Protocol):
    """What a node publishes of a loaded version; the wire's TokenizerBundle."""

    version_id: str
    tokenizer_json: bytes
    chat_template: str
    bos_token: str
    eos_token: str
    vocab_size: int
    max_model_len: int
    dimensions: int


class Encoder:
    """Tokenizer and chat template of one version; safe to call from any thread."""

    def __init__(self, bundle: Bundle) -> None:
        text = bundle.tokenizer_json.decode()
        self.version_id = bundle.version_id
        self.max_model_len = bundle.max_model_len
        self.dimensions = bundle.dimensions
        self._marked, self._plain = _tokenizer(text), _tokenizer(text)
        self._plain.encode_special_tokens = True
        self.vocab_size = bundle.vocab_size or self._marked.get_vocab_size()
        self._specials = _special_pattern(self._marked)
        self._longest = max(len(token.encode()) for token in self._marked.get_vocab())
        self._template = _compile(bundle.chat_template) if bundle.chat_template else None
        self._names = {"bos_token": bundle.bos_token, "eos_token": bundle.eos_token}
        if self._template is not None:
            self._names = {**self._template.globals, **self._names}

    # --- chat -----------------------------------------------------------------------------------
    async def chat(self, messages: Sequence[ChatMessage], limit: int) -> tuple[int, ...]:
        """Token ids of the rendered conversation; raises Refused, also if it cannot fit."""
        num_chars = sum(len(message.content) for message in messages)
        self._check_size(num_chars, limit, "messages")
        if num_chars < LONG_TEXT:
            return self._encode_chat(messages)
        return await asyncio.to_thread(self._encode_chat, messages)

    def _encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        contents = [message.content for message in messages]
        if not any(self._specials.search(content) for content in contents):
            rendered = self._render(messages, contents)
            return tuple(_ids(self._marked, rendered))
        return self._encode_apart(messages, contents)

    def _encode_apart(
        self, messages: Sequence[ChatMessage], contents: Sequence[str]
    ) -> tuple[int, ...]:
        nonce = secrets.token_hex(8)
        rendered = self._render(messages, [f"{nonce}x{i}x" for i in range(len(contents))])
        ids: list[int] = []
        for position, piece in enumerate(re.split(rf"{nonce}x(\d+)x", rendered)):
            is_content = position % 2 == 1
            tokenizer, text = (
                (self._plain, contents[int(piece)]) if is_content else (self._marked, piece)
            )
            ids += _ids(tokenizer, text)
        return tuple(ids)

    def _render(self, messages: Sequence[ChatMessage], contents: Sequence[str]) -> str:
        if self._template is None:
            raise Refused(
                "no_chat_template", "This model has no chat template; use /v1/completions.", "model"
            )
        shown = [{"role": m.role, "content": c} for m, c in zip(messages, contents, strict=True)]
        names = {**self._names, "messages": shown, "add_generation_prompt": True}
        template = self._template
        try:  # what Template.render does, less the merging of unchanging globals for each request
            context = new_context(
                template.environment, template.name, template.blocks, names, True, None
            )
            return "".join(template.root_render_func(context))
        except TemplateError as error:
            text = str(error.message or "the chat template refuses them")[:200]
            raise Refused("invalid_messages", f"Messages: {text}", "messages") from error
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            text = "The chat template cannot render these messages."
            raise Refused("invalid_messages", text, "messages") from error

    # --- plain prompts --------------------------------------------------------------------------
    async def prompt(self, prompt: str | Sequence[int], limit: int) -> tuple[int, ...]:
        """Token ids of one completion prompt; raises Refused."""
        if not isinstance(prompt, str):
            return self._checked_ids(prompt)
        self._check_size(len(prompt), limit, "prompt")
        if len(prompt) < LONG_TEXT:
            return self._encode_plain(prompt)
        return await asyncio.to_thread(self._encode_plain, prompt)

    async def inputs(
        self, inputs: Sequence[str | Sequence[int]], limit: int
    ) -> list[tuple[int, ...]]:
        """Token ids of texts to embed, with the tokens that the tokenizer puts around each, and of
        token ids as they are; raises Refused, also for one longer than ``limit``."""
        if sum(map(len, inputs)) < LONG_TEXT:
            return self._encode_inputs(inputs, limit)
        return await asyncio.to_thread(self._encode_inputs, inputs, limit)

    def _encode_inputs(
        self, inputs: Sequence[str | Sequence[int]], limit: int
    ) -> list[tuple[int, ...]]:
        return [self._encode_input(one, limit, index) for index, one in enumerate(inputs)]

    def _encode_input(self, one: str | Sequence[int], limit: int, index: int) -> tuple[int, ...]:
        if not isinstance(one, str):
            _check_length(len(one), limit, index)
            return self._checked_ids(one, "input")
        _check_length(len(one.split()), limit, index)  # there are no fewer tokens than words
        ids = self._encode_plain(one)
        _check_length(len(ids), limit, index)
        return ids

    def check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is not None and dimensions > self.dimensions:
            text = f"This model's vectors have {self.dimensions} dimensions."
            raise Refused("invalid_parameter", text, "dimensions")

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """With the tokens that the tokenizer itself puts around a text, such as BOS."""
        return tuple(self._plain.encode(text).ids)

    def _checked_ids(self, prompt: Sequence[int], param: str = "prompt") -> tuple[int, ...]:
        if max(prompt) >= self.vocab_size:
            raise Refused("invalid_token_id", f"Token ids are below {self.vocab_size}.", param)
        return tuple(prompt)

    def check_bias(self, bias: dict[int, float]) -> None:
        if bias and max(bias) >= self.vocab_size:
            raise Refused(
                "invalid_parameter", f"Token ids are below {self.vocab_size}.", "logit_bias"
            )

    def _check_size(self, num_chars: int, limit: int, param: str) -> None:
        """Refuse before tokenising what cannot fit: a token covers at most the longest one."""
        if num_chars > limit * self._longest:
            raise Refused(
                "context_length_exceeded",
                f"This model's maximum context length is {limit} tokens; {num_chars} characters "
                "cannot fit.",
                param,
            )


def _check_length(num_tokens: int, limit: int, index: int) -> None:
    if num_tokens > limit:
        raise Refused(
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens; input {index} has "
            f"{num_tokens} or more.",
            "input",
        )


def _tokenizer(text: str) -> Tokenizer:
    """Without the padding and truncation that some files ask for: what is sent is what is meant."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids alone: working out the offsets as well takes half as long again."""
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    found: list[int] = encoded.ids
    return found


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    texts = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, **_: Any) -> str:
    return msgspec.json.encode(value).decode()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class Encoders:
    """The encoders of all versions, each loaded once, when it is first needed.

    A version's context length comes from the same bundle, and is kept without the tokenizer: a
    list of all models needs the one and not the other.
    """

    def __init__(self, fetch: Callable[[str], Awaitable[Any]]) -> None:
        self._fetch = fetch
        self._ready: dict[str, Encoder] = {}
        self._loading: dict[str, asyncio.Task[Encoder]] = {}
        self._contexts: dict[str, int] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def get(self, version_id: str) -> Encoder:
        """Raises NotLoadedYet until a node has published the tokenizer, Refused."""
        ready = self._ready.get(version_id)
        if ready is not None:
            return ready
        task = self._loading.get(version_id)
        if task is None:
            task = self._loading[version_id] = asyncio.create_task(self._load(version_id))
            task.add_done_callback(lambda _: self._loading.pop(version_id, None))
        return await asyncio.shield(task)

    async def context(self, version_id: str, fetch: bool) -> int:
        """Tokens that the loaded model takes; 0 if that is not known, and with ``fetch`` cannot be
        had at once either."""
        if version_id not in self._contexts and fetch:
            task = self._reading.get(version_id)
            if task is None:
                task = self._reading[version_id] = asyncio.create_task(self._read(version_id))
                task.add_done_callback(lambda _: self._reading.pop(version_id, None))
            await asyncio.shield(task)
        return self._contexts.get(version_id, 0)

    async def _read(self, version_id: str) -> None:
        """The figure alone; one damaged bundle does not spoil the list of all models."""
        try:
            async with asyncio.timeout(CONTEXT_WAIT_S):
                bundle = await self._fetch(version_id)
        except Exception as error:
            _log.warning("context length of %s: %r", version_id, error)
        else:
            if bundle is not None:
                self._contexts[version_id] = bundle.max_model_len

    async def _load(self, version_id: str) -> Encoder:
        bundle = await self._fetch(version_id)
        if bundle is None:
            raise NotLoadedYet(version_id)
        try:
            encoder = await asyncio.to_thread(Encoder, bundle)
        except Exception as error:  # tokenizers raises plain Exception for a file it cannot read
            text = f"The tokenizer of '{version_id}' is unusable."
            raise Refused("model_not_ready", text, "model") from error
        self._ready[version_id] = encoder
        self._contexts[version_id] = encoder.max_model_len
        return encoder

    def forget(self, version_id: str) -> None:
        self._ready.pop(version_id, None)
        self._contexts.pop(version_id, None)
