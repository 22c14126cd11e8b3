"""Parse a model source: `pypi://package==version`, `hf://org/name@rev`, `file:///path`,
`s3://bucket/prefix`."""

import re
from dataclasses import dataclass
from pathlib import Path

from gpuagent.agent.model_store.errors import ModelStoreError

PYPI = re.compile(
    r"pypi://([A-Za-z0-9](?:[A-Za-z0-9._-]{0,100}[A-Za-z0-9])?)==([0-9A-Za-z.!+]{1,64})"
)
HUB = re.compile(r"hf://(\w[\w.-]{0,95}/\w[\w.-]{0,95})@(\w[\w./-]{0,127})", re.ASCII)

S3 = re.compile(r"s3://(\w[\w.-]{0,95})((?:/(?!\.{1,2}(?:/|$))[\w.-]+)*)/?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PypiSource:
    """A wheel on the configured package index; the version is exact."""

    package: str
    version: str


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the Hugging Face hub at a revision (branch, tag or commit)."""

    repository: str
    revision: str


@dataclass(frozen=True, slots=True)
class FileSource:
    """A folder on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class S3Source:
    """What lies under a prefix of a bucket; the prefix has no slash at either end."""

    bucket: str
    prefix: str

    @property
    def text(self) -> str:
        """The source as people write it, without a slash at its end."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """The object's key, of a name under the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name


Source = PypiSource | HubSource | FileSource | S3Source


def parse_source(text: str) -> Source:
    """Return the parsed source; raises `source_not_allowed` for anything else.

    Names that begin with `-` or hold `..` never match, so no source can become an option
    of a child process or leave its folder.
    """
    if match := PYPI.fullmatch(text):
        return PypiSource(match[1], match[2])
    if (match := HUB.fullmatch(text)) and ".." not in text:
        return HubSource(match[1], match[2])
    if text.startswith("file:///") and "\0" not in text:
        return FileSource(Path(text.removeprefix("file://")))
    if match := S3.fullmatch(text):
        return S3Source(match[1], match[2].lstrip("/"))
    raise ModelStoreError("source_not_allowed", f"not a source this store knows: {text[:200]!r}")
