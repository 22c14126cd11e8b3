"""From the JSON of a request to checked values: each field has one checker, or is refused.

A field is known (a checker below), ignored (of its type, and changes nothing about the answer),
refused by name (it would change the meaning and is not supported), or unknown, which is refused
too. A null is an absent field, as OpenAI's own clients expect. Nothing here knows a model; what
depends on one (context length, vocabulary) is checked where the prompt is encoded.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from controlplane.application.inference import SamplingOptions
from controlplane.application.refused import Refused

MAX_CHOICES = 8
MAX_PROMPTS = 32
MAX_LOGPROBS = 20
MAX_STOPS = 4
MAX_STOP_CHARS = 64
MAX_BIASES = 1024
MAX_MESSAGES = 4096
MAX_TOKEN_ID = 2**31

SERVICE_TIERS = {
    "auto": "",
    "default": "standard",
    "standard": "standard",
    "priority": "realtime",
    "realtime": "realtime",
    "flex": "batch",
    "batch": "batch",
}
_UNSUPPORTED = frozenset({"tools", "functions", "function_call", "tool_choice", "audio", "echo",
                          "suffix", "best_of", "web_search_options", "modalities"})  # fmt: skip
_HARMLESS: dict[str, tuple[Any, ...]] = {  # values of unsupported fields that ask for nothing
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "modalities": (["text"],),
}
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_MESSAGE_IGNORED = frozenset(
    {"name", "refusal", "annotations", "reasoning", "reasoning_content", "id"}
)
_BIAS_KEY = re.compile(r"[0-9]{1,10}", re.ASCII)


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class Parameters(msgspec.Struct, kw_only=True):
    """A checked request. ``max_tokens`` None fills the context; ``n`` counts choices a prompt.

    One that ``embeds`` has inputs as ``prompts``; ``dimensions`` None leaves vectors as they are.
    """

    model: str
    messages: list[ChatMessage] = []
    prompts: list[str | list[int]] = []
    sampling: SamplingOptions
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    user: str = ""
    latency_class: str = ""
    embeds: bool = False
    encoding_format: str = "float"
    dimensions: int | None = None


Fields = Mapping[str, Any]


def chat_parameters(body: Fields) -> Parameters:
    """Check a chat completion request; raises Refused with ``param``."""
    fields = checked(body, _CHAT, "messages")
    fields.pop("response_format", None)
    top = fields.pop("top_logprobs", None)
    wanted = fields.pop("logprobs", None)
    if top is not None and not wanted:
        _fail("top_logprobs", "top_logprobs needs logprobs to be true.")
    fields["logprobs"] = (top or 0) if wanted else None
    completion_tokens = fields.pop("max_completion_tokens", None)
    if completion_tokens is not None:
        fields["max_tokens"] = completion_tokens
    return _build(fields)


def completion_parameters(body: Fields) -> Parameters:
    """Check a completion request; raises Refused with ``param``."""
    fields = checked(body, _COMPLETION, "prompt")
    fields["prompts"] = fields.pop("prompt")
    if len(fields["prompts"]) * fields.get("n", 1) > MAX_PROMPTS:
        _fail("n", f"Prompts times n is at most {MAX_PROMPTS}.")
    return _build(fields)


def _build(fields: dict[str, Any]) -> Parameters:
    sampling = {name: fields.pop(name) for name in _SAMPLING if name in fields}
    options = fields.pop("stream_options", None)
    if options is not None and not fields.get("stream"):
        _fail("stream_options", "stream_options needs stream to be true.")
    fields["include_usage"] = bool(options and options.get("include_usage"))
    fields["latency_class"] = fields.pop("service_tier", "")
    return Parameters(sampling=SamplingOptions(**sampling), **fields)


def checked(
    body: Fields, checkers: Mapping[str, Callable[[str, Any], Any]], prompt: str
) -> dict[str, Any]:
    """Every present field through its checker; ``model`` and ``prompt`` must be there."""
    fields = {}
    for name, value in body.items():
        checker = checkers.get(name)
        if checker is not None:
            if value is not None:
                fields[name] = checker(name, value)
        else:
            _ignore_or_refuse(name, value)
    for name in ("model", prompt):
        if name not in fields:
            raise Refused("missing_field", f"{name} is required.", name)
    return fields


def _ignore_or_refuse(name: str, value: Any) -> None:
    has_type = _UNUSED.get(name)
    if has_type is not None and value is not None:
        has_type(name, value)
    if name in _IGNORED:
        return
    if name in _UNSUPPORTED:
        if value is None or value in _HARMLESS.get(name, ()):
            return
        raise Refused("unsupported_parameter", f"{name} is not supported.", name)
    raise Refused("unknown_field", f"There is no parameter '{name[:64]}'.", name[:64])


def _fail(param: str, message: str) -> None:
    raise Refused("invalid_parameter", message, param)


# --- checkers -----------------------------------------------------------------------------------
def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Refused("invalid_type", f"{name} is a string.", name)
    return value


def model_name(name: str, value: Any) -> str:
    text = _text(name, value)
    if not 1 <= len(text) <= 255:
        _fail(name, "model has 1 to 255 characters.")
    return text


def user_name(name: str, value: Any) -> str:
    text = _text(name, value)
    if len(text) > 512:
        _fail(name, f"{name} has at most 512 characters.")
    return text


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Refused("invalid_type", f"{name} is true or false.", name)
    return value


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused("invalid_type", f"{name} is an integer.", name)
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused("invalid_type", f"{name} is an object.", name)
    return value


def whole(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if not low <= _integer(name, value) <= high:
            _fail(name, f"{name} is from {low} to {high}.")
        return int(value)

    return check


def _number(low: float, high: float, *, above_low: bool = False) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Refused("invalid_type", f"{name} is a number.", name)
        if not low <= value <= high or (above_low and value == low):
            _fail(name, f"{name} is {'above' if above_low else 'from'} {low:g} to {high:g}.")
        return float(value) + 0.0  # turns -0.0 into 0.0

    return check


def _max_tokens(name: str, value: Any) -> int:
    """At least one; how many the model's context leaves is known only with the prompt."""
    if _integer(name, value) < 1:
        raise Refused("context_length_exceeded", f"{name} is at least 1.", name)
    return int(value)


def _top_k(name: str, value: Any) -> int:
    """-1 is vLLM's way of saying off."""
    return max(whole(-1, 2**31 - 1)(name, value), 0)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise Refused("invalid_type", "stop is a string or a list of strings.", name)
    if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        _fail(name, f"stop has at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters.")
    return tuple(stops)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise Refused("invalid_type", f"{name} is a list of at most 64 token ids.", name)
    return tuple(whole(0, MAX_TOKEN_ID)(name, item) for item in value)


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise Refused("invalid_type", "logit_bias maps token ids to numbers.", name)
    if len(value) > MAX_BIASES:
        _fail(name, f"logit_bias has at most {MAX_BIASES} entries.")
    bias = _number(-100, 100)
    if not all(_BIAS_KEY.fullmatch(key) for key in value):
        _fail(name, "A key of logit_bias is a token id.")
    return {int(key): bias(name, item) for key, item in value.items()}


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    known = {"include_usage", "include_obfuscation"}
    for key, item in _object(name, value).items():
        if key not in known:
            raise Refused("unknown_field", f"There is no {name}.{key[:64]}.", f"{name}.{key[:64]}")
        if item is not None:
            _flag(f"{name}.{key}", item)
    return dict(value)


def service_tier(name: str, value: Any) -> str:
    text = _text(name, value)
    if text not in SERVICE_TIERS:
        _fail(name, f"{name} is one of {', '.join(SERVICE_TIERS)}.")
    return SERVICE_TIERS[text]


def _response_format(name: str, value: Any) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise Refused("invalid_type", "response_format is an object with a type.", name)
    if value["type"] != "text":
        raise Refused(
            "unsupported_parameter",
            f"response_format {value['type'][:32]!r} is not supported.",
            name,
        )


# --- messages and prompts -----------------------------------------------------------------------
def _messages(name: str, value: Any) -> list[ChatMessage]:
    if not isinstance(value, list):
        raise Refused("invalid_type", "messages is a list.", name)
    if len(value) > MAX_MESSAGES:
        _fail(name, f"There are at most {MAX_MESSAGES} messages.")
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(value)]
    if not any(message.content.strip() for message in messages):
        raise Refused("empty_prompt", "The messages say nothing.", name)
    return messages


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise Refused("invalid_type", f"{where} is an object.", where)
    for key, item in value.items():
        if key not in ("role", "content") and key not in _MESSAGE_IGNORED and item:
            _refuse_message_field(key, where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        if role == "tool" or role == "function":
            raise Refused("unsupported_parameter", f"{where} has the role {role}.", f"{where}.role")
        _fail(f"{where}.role", f"{where}.role is one of {', '.join(_ROLES)}.")
    return ChatMessage(_ROLES[str(role)], _content(value.get("content"), str(role), where))


def _refuse_message_field(key: str, where: str) -> None:
    param = f"{where}.{key[:64]}"
    if key in ("tool_calls", "function_call", "audio", "tool_call_id"):
        raise Refused("unsupported_parameter", f"{param} is not supported.", param)
    raise Refused("unknown_field", f"There is no {param}.", param)


def _content(value: Any, role: str, where: str) -> str:
    param = f"{where}.content"
    if isinstance(value, str):
        return value
    if value is None and role == "assistant":
        return ""
    if isinstance(value, list):
        return "\n".join(_part(part, f"{param}[{i}]") for i, part in enumerate(value))
    raise Refused("invalid_type", f"{param} is a string or a list of parts.", param)


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise Refused("invalid_type", f"{where} is an object with a type.", where)
    if value["type"] != "text":
        raise Refused("modality_not_supported", f"{where} is not text.", where)
    return _text(f"{where}.text", value.get("text"))


def prompts_up_to(most: int) -> Callable[[str, Any], list[str | list[int]]]:
    """One text, its token ids, or a list of either."""

    def check(name: str, value: Any) -> list[str | list[int]]:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise Refused("invalid_type", f"{name} is a string, a list, or token ids.", name)
        if value and isinstance(value[0], int):
            value = [value]
        if len(value) > most:
            _fail(name, f"{name} has at most {most} entries.")
        prompts = [_prompt(name, item) for item in value]
        if not prompts or not all(prompts):
            raise Refused("empty_prompt", f"{name} is empty, or holds something empty.", name)
        return prompts

    return check


def _prompt(name: str, value: Any) -> str | list[int]:
    if isinstance(value, str):
        return value if value.strip() else ""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise Refused("invalid_type", f"{name} is a string, a list, or token ids.", name)
    if value and not 0 <= min(value) <= max(value) < MAX_TOKEN_ID:
        raise Refused("invalid_token_id", "A token id is out of range.", name)
    return value


_COMMON: dict[str, Callable[[str, Any], Any]] = {
    "model": model_name,
    "max_tokens": _max_tokens,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above_low=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "n": whole(1, MAX_CHOICES),
    "seed": whole(-(2**63), 2**63 - 1),
    "stop": _stop,
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 10, above_low=True),
    "logit_bias": _logit_bias,
    "stream": _flag,
    "stream_options": _stream_options,
    "user": user_name,
    "service_tier": service_tier,
}
_CHAT = _COMMON | {
    "messages": _messages,
    "response_format": _response_format,
    "max_completion_tokens": _max_tokens,
    "logprobs": _flag,
    "top_logprobs": whole(0, MAX_LOGPROBS),
}
_COMPLETION = _COMMON | {"prompt": prompts_up_to(MAX_PROMPTS), "logprobs": whole(0, MAX_LOGPROBS)}
_SAMPLING = SamplingOptions.__struct_fields__
_IGNORED: dict[str, Callable[[str, Any], Any]] = {
    "metadata": _object,
    "store": _flag,
    "reasoning_effort": _text,
    "safety_identifier": _text,
    "prompt_cache_key": _text,
    "prompt_cache_retention": _text,
    "verbosity": _text,
    "parallel_tool_calls": _flag,
    "prediction": _object,
    "cache_salt": _text,
    "priority": _integer,
}
# True == 1 in Python: without its type, a value would pass for the harmless one that it equals.
_UNUSED = _IGNORED | {"echo": _flag, "best_of": _integer}
