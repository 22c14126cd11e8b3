"""What a gateway needs to turn messages into tokens, read from a model folder.

The agent publishes it, so that a gateway never touches weights. The template is a string
here; it is rendered elsewhere, in a sandbox.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuagent.agent.model_store.errors import ModelStoreError

MAX_TOKENIZER_BYTES = 64 << 20
MAX_TEMPLATE_CHARS = 256 << 10
UNBOUNDED_LENGTH = 10**9  # transformers writes 10^30 for "no limit known"


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The tokenizer file and what must be known to use it. Token ids are vocabulary rows.

    `max_model_len` is in tokens. `special_tokens` maps a role (`bos_token`, `pad_token`, ...)
    to its text. `chat_template` is "" for a model that has none.
    """

    tokenizer_json: bytes
    chat_template: str
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    max_model_len: int
    vocab_size: int
    special_tokens: dict[str, str]


def read_tokenizer_bundle(folder: Path) -> TokenizerBundle:
    """Read the bundle of a model folder; raises `tokenizer_rejected` if it is unusable."""
    settings = _read_json(folder / "tokenizer_config.json")
    model = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    ids = {**model, **{k: v for k, v in generation.items() if v is not None}}
    return TokenizerBundle(
        tokenizer_json=_read_bytes(folder / "tokenizer.json"),
        chat_template=_chat_template(folder, settings),
        bos_token_id=_optional_id(ids.get("bos_token_id")),
        eos_token_id=token_ids(ids.get("eos_token_id")),
        pad_token_id=_optional_id(ids.get("pad_token_id")),
        max_model_len=_max_model_len(settings, model),
        vocab_size=int(model.get("vocab_size") or 0),
        special_tokens=_special_tokens(settings),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` is absent, one id or a list of ids, depending on who wrote the file."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
        raise ModelStoreError("tokenizer_rejected", "token ids must be integers from 0")
    return tuple(values)


def _optional_id(value: Any) -> int | None:
    return next(iter(token_ids(value)), None)


def _max_model_len(settings: dict[str, Any], model: dict[str, Any]) -> int:
    lengths = [settings.get("model_max_length"), model.get("max_position_embeddings")]
    usable = [n for n in lengths if isinstance(n, int) and 0 < n < UNBOUNDED_LENGTH]
    if not usable:
        raise ModelStoreError("tokenizer_rejected", "no maximum length is stated")
    return min(usable)


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    template = _read_bytes(file).decode() if file.exists() else settings.get("chat_template") or ""
    if isinstance(template, list):  # several named templates: the one called default
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default") or ""
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS:
        raise ModelStoreError("tokenizer_rejected", "the chat template is not a short text")
    return template


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for role, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(text, str):
            found[role] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ModelStoreError("tokenizer_rejected", f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelStoreError("tokenizer_rejected", f"{path.name} is not an object")
    return value


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelStoreError("tokenizer_rejected", f"{path.name} is too large")
        return path.read_bytes()
    except OSError as error:
        raise ModelStoreError("tokenizer_rejected", f"{path.name}: {error}") from error
