"""Signed notes: the C2SP format of Go's checksum database, with Ed25519 keys.

A note is text, an empty line, and a line for each signature. The signature covers the text with
its last newline, and names its key by four bytes of SHA-256(name || newline || 0x01 || key)::

    engine/events                                   a checkpoint's text: origin,
    2048                                            size and root of the log,
    CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=
    time 1700000060.250                             then lines of our own
    …

    — engine +Vk8bXyt7pW…                           base64 of key hash (4 bytes) and signature (64)

A public key is one line too, ``engine+f959316d+Ae…``, which is all that a verifier needs.
"""

import base64
import binascii
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_ED25519 = b"\x01"
_DASH = "\u2014 "
_PRIVATE = "PRIVATE+KEY+"


class NoteError(Exception):
    """A note or key that cannot be read, or is not signed by whom it should be."""


@dataclass(frozen=True)
class PublicKey:
    """``line`` is its written form, ``name+hash+base64``."""

    name: str
    raw: bytes

    @property
    def hash(self) -> bytes:
        return _key_hash(self.name, self.raw)

    @property
    def line(self) -> str:
        return f"{self.name}+{self.hash.hex()}+{_base64(_ED25519 + self.raw)}"

    def verifies(self, text: str, signature: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, text.encode())
        except InvalidSignature:
            return False
        return True


class Signer:
    """A private key with its name."""

    def __init__(self, name: str, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public = PublicKey(_valid_name(name), self._key.public_key().public_bytes_raw())

    @classmethod
    def generate(cls, name: str) -> "Signer":
        return cls(name, Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def parse(cls, line: str) -> "Signer":
        """From its written form, ``PRIVATE+KEY+name+hash+base64``; raises NoteError."""
        if not line.startswith(_PRIVATE):
            raise NoteError("not a private key: it starts with PRIVATE+KEY+")
        name, digest, raw = _key_parts(line.strip().removeprefix(_PRIVATE))
        signer = cls(name, raw)
        if signer.public.hash.hex() != digest:
            raise NoteError("the private key's hash does not match")
        return signer

    @property
    def line(self) -> str:
        public = self.public
        return f"{_PRIVATE}{public.name}+{public.hash.hex()}+{_base64(_ED25519 + self._seed)}"

    def signature_line(self, text: str) -> str:
        signature = self._key.sign(text.encode())
        return f"{_DASH}{self.public.name} {_base64(self.public.hash + signature)}\n"


def sign(text: str, signers: Sequence[Signer]) -> str:
    """The note over ``text``, which ends with a newline."""
    return f"{text}\n{''.join(signer.signature_line(text) for signer in signers)}"


@dataclass(frozen=True)
class Note:
    """``signatures`` are (key name, key hash, signature)."""

    text: str
    signatures: tuple[tuple[str, bytes, bytes], ...]

    def signers(self, keys: Collection[PublicKey]) -> list[PublicKey]:
        """Those of ``keys`` that signed it; raises NoteError if a signature by one is wrong."""
        found = []
        for name, digest, signature in self.signatures:
            for key in keys:
                if (key.name, key.hash) == (name, digest):
                    if not key.verifies(self.text, signature):
                        raise NoteError(f"the signature of {name}+{digest.hex()} is wrong")
                    found.append(key)
        return found

    @property
    def key_names(self) -> str:
        return ", ".join(f"{name}+{digest.hex()}" for name, digest, _ in self.signatures)


def parse_key(line: str) -> PublicKey:
    """Raises NoteError."""
    name, digest, raw = _key_parts(line.strip())
    key = PublicKey(name, raw)
    if key.hash.hex() != digest:
        raise NoteError(f"the key's hash does not match: {line.strip()[:80]}")
    return key


def parse_keys(text: str) -> list[PublicKey]:
    """A key a line; empty lines and lines with # do not count."""
    lines = (line.strip() for line in text.splitlines())
    return [parse_key(line) for line in lines if line and not line.startswith("#")]


def parse_note(written: str) -> Note:
    """Raises NoteError."""
    text, found, tail = written.rpartition("\n\n")
    lines = tail.split("\n")
    if not found or lines[-1] or len(lines) < 2:
        raise NoteError("not a signed note: text, an empty line, signatures")
    return Note(text + "\n", tuple(_signature(line) for line in lines[:-1]))


def split_notes(written: str) -> Iterator[str]:
    """The notes in a file that holds one after the other, each followed by an empty line."""
    lines: list[str] = []
    for line in written.splitlines(keepends=True):
        if line == "\n" and lines and lines[-1].startswith(_DASH):
            yield "".join(lines)
            lines.clear()
        else:
            lines.append(line)
    if lines:
        yield "".join(lines)


def join_notes(notes: Sequence[str]) -> str:
    return "".join(f"{note}\n" for note in notes)


def note_hash(written: str) -> bytes:
    """What the next note names as its ``previous``: SHA-256 of the whole note."""
    return sha256(written.encode()).digest()


def _signature(line: str) -> tuple[str, bytes, bytes]:
    name, _, encoded = line.removeprefix(_DASH).partition(" ")
    raw = unbase64(encoded)
    if not line.startswith(_DASH) or not name or len(raw) != 68:
        raise NoteError("a signature line is malformed")
    return name, raw[:4], raw[4:]


def _key_parts(line: str) -> tuple[str, str, bytes]:
    name, _, rest = line.partition("+")
    digest, _, encoded = rest.partition("+")
    raw = unbase64(encoded)
    if len(raw) != 33 or raw[:1] != _ED25519:
        raise NoteError(f"not an Ed25519 key: {name[:40]}")
    return _valid_name(name), digest, raw[1:]


def _valid_name(name: str) -> str:
    if not name or "+" in name or any(letter.isspace() for letter in name):
        raise NoteError(f"a key's name has neither a space nor a +: {name!r}")
    return name


def _key_hash(name: str, raw: bytes) -> bytes:
    return sha256(name.encode() + b"\n" + _ED25519 + raw).digest()[:4]


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def unbase64(text: str) -> bytes:
    """Strict, so that no two texts mean the same bytes; raises NoteError."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NoteError(f"not base64: {text[:60]!r}") from error
    if _base64(raw) != text:
        raise NoteError(f"not canonical base64: {text[:60]!r}")
    return raw
