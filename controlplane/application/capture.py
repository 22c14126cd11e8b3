"""What a request asked and was answered, kept only for tenants that asked for it, and encrypted.

The text is one JSON document, encrypted with AES-256-GCM under its tenant's data key of the present
generation; tenant, request and generation are authenticated with it, so no row passes for another::

    {"endpoint":"chat","prompt":[["user","Hello"]],"answers":["Hi."],"truncated":[]}
    ciphertext   document and tag; nonce 96 random bits, which is good for 2^32 texts of one key
    text_hash    SHA-256 of nonce and ciphertext: all that the sealed record holds of it

So whoever destroys the key has erased the text in every copy, while the seals go on to hold. Of
prompts and of answers 128 KiB each are kept; ``truncated`` names what was cut there. A request of
a tenant that did not opt in has no ``Capture`` at all, and costs nothing for this.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_PROMPT_BYTES = 128 * 1024
MAX_ANSWER_BYTES = 128 * 1024
KEY_BYTES = 32
_NONCE_BYTES = 12
_encode = msgspec.json.encode


class TextKey(NamedTuple):
    """A tenant's data key of one generation."""

    generation: int
    secret: bytes


class Text(msgspec.Struct, frozen=True):
    """``prompt``: (role, text) of each message, or ("prompt", text) of each prompt; ``answers``:
    one a choice. ``truncated`` names what was longer: prompt, answers."""

    endpoint: str
    prompt: list[tuple[str, str]]
    answers: list[str]
    truncated: list[str]


@dataclass(frozen=True, slots=True)
class EncryptedText:
    """What is stored of a text."""

    generation: int
    nonce: bytes
    ciphertext: bytes

    @property
    def hash(self) -> str:
        """What its request's sealed record holds (hex)."""
        return text_hash(self.nonce, self.ciphertext)


class Unreadable(Exception):
    """The text was not encrypted under this key, or for another request, or was changed."""


def text_hash(nonce: bytes, ciphertext: bytes) -> str:
    return sha256(nonce + ciphertext).hexdigest()


def new_key() -> bytes:
    return os.urandom(KEY_BYTES)


def encrypt(key: TextKey, tenant_id: str, request_id: str, text: Text) -> EncryptedText:
    nonce = os.urandom(_NONCE_BYTES)
    about = _about(tenant_id, request_id, key.generation)
    ciphertext = AESGCM(key.secret).encrypt(nonce, _encode(text), about)
    return EncryptedText(key.generation, nonce, ciphertext)


def decrypt(key: TextKey, tenant_id: str, request_id: str, stored: EncryptedText) -> Text:
    """Raises Unreadable."""
    about = _about(tenant_id, request_id, stored.generation)
    try:
        document = AESGCM(key.secret).decrypt(stored.nonce, stored.ciphertext, about)
    except InvalidTag as error:
        raise Unreadable("the text does not belong to this key and request") from error
    return msgspec.json.decode(document, type=Text)


def _about(tenant_id: str, request_id: str, generation: int) -> bytes:
    return _encode(("text/1", tenant_id, request_id, generation))


@dataclass(slots=True)
class Capture:
    """The text of one request while it runs; ``add`` as its answers come.

    >>> capture = Capture(TextKey(0, bytes(32)), "chat", [("user", "Hello")])
    >>> capture.add(0, "Hi")
    >>> capture.add(0, ".")
    >>> capture.text().answers
    ['Hi.']
    """

    key: TextKey
    endpoint: str
    prompt: Sequence[tuple[str, str]]
    _answers: dict[int, list[str]] = field(default_factory=dict)
    _room: int = MAX_ANSWER_BYTES
    _was_cut: bool = False

    def add(self, choice: int, text: str) -> None:
        kept = cut(text, self._room)
        self._was_cut = self._was_cut or len(kept) < len(text)
        if kept:
            self._room -= len(kept.encode())
            self._answers.setdefault(choice, []).append(kept)

    def text(self) -> Text:
        prompt, was_cut = _cut_prompt(self.prompt)
        last = max(self._answers, default=-1)
        answers = ["".join(self._answers.get(choice, ())) for choice in range(last + 1)]
        truncated = [*(["prompt"] if was_cut else []), *(["answers"] if self._was_cut else [])]
        return Text(self.endpoint, prompt, answers, truncated)

    def encrypted(self, tenant_id: str, request_id: str) -> EncryptedText:
        return encrypt(self.key, tenant_id, request_id, self.text())


def _cut_prompt(prompt: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], bool]:
    kept, room = [], MAX_PROMPT_BYTES
    for role, text in prompt:
        piece = cut(text, room)
        room -= len(piece.encode())
        kept.append((role, piece))
        if len(piece) < len(text):
            return kept, True
    return kept, False


def cut(text: str, room: int) -> str:
    """As much of the beginning as ``room`` bytes of UTF-8 hold. A lone surrogate, which JSON can
    bring and UTF-8 cannot hold, is kept as a question mark.

    >>> cut("häß", 3)
    'hä'
    """
    content = text.encode(errors="replace")
    return content.decode() if len(content) <= room else content[:room].decode(errors="ignore")


def keep(capture: Capture, receive: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """``receive(part, delta)`` of a call, which also keeps what comes. A call without a capture
    receives as ever: not even a comparison is added to each of its tokens."""

    def receive_and_keep(part: Any, delta: Any) -> None:
        if delta.text:
            capture.add(part.index, delta.text)
        receive(part, delta)

    return receive_and_keep
