"""Models in a bucket: `s3://bucket/prefix`, of AWS or of whatever else speaks its protocol.

What lies under a prefix can change, so the source's text does not say which files were meant. The
listing does: names, sizes and ETags of one moment are the identity of what is fetched, as a commit
is of a repository. Every read asks for the ETag that was listed (`If-Match`), so a folder is never
put together of two states, and what an earlier try has left on disk is gone on from.

    3f1c…-2  268435456  model.safetensors  \\
    9b0e…    704        config.json         }  sha256 -> the name of the folder in the cache

Endpoint, region and credentials are the agent's, in the environment under their usual names
(`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, ...); with no credentials requests are not
signed. What a server says may quote a key or a signature, so it is told to nobody: a status and an
S3 error code are all that is taken from it.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import structlog

from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.fetch import MODEL_PATTERNS, Limits, Progress, check_files
from gpuagent.agent.model_store.sources import S3Source

log = structlog.get_logger("gpuagent.model_store")

CHUNK_BYTES = 8 << 20  # held in memory, and how often a load looks whether it is still wanted
MAX_OBJECTS = 10_000  # under one prefix, of whatever kind
_SIGNS_WITH = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# A body may take hours; silence may not. What outlasts the retries is tried again by the agent.
_CLIENT: dict[str, Any] = {
    "connect_timeout": timedelta(seconds=10),
    "read_timeout": timedelta(seconds=30),
    "timeout": timedelta(hours=24),
}
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_ELSEWHERE = {"AuthorizationHeaderMalformed", "PermanentRedirect"}
_MD5_TAG = re.compile(r'"?([0-9a-f]{32})"?')


class RemoteFile(NamedTuple):
    """An object as it was listed: its name under the prefix, bytes, and the server's tag."""

    name: str
    size: int
    etag: str


def identity(files: Sequence[RemoteFile]) -> str:
    """Hex SHA-256 of a listing; equal for the same names, sizes and tags in any order."""
    lines = (f"{file.etag} {file.size} {file.name}\n" for file in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class Bucket:
    """What a source names, read through one client; every method raises ModelStoreError."""

    def __init__(self, source: S3Source) -> None:
        from obstore.store import S3Store  # a native library, and seldom needed

        self._source, self.where = source, source.text
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        asked = os.environ.get("AWS_SKIP_SIGNATURE", "").lower()
        has_keys = any(os.environ.get(name) for name in _SIGNS_WITH)
        self._is_anonymous = asked == "true" or not (asked or has_keys)
        options: dict[str, Any] = {"skip_signature": self._is_anonymous}
        if endpoint:
            options["endpoint"] = endpoint
        client: Any = {**_CLIENT, "allow_http": endpoint.startswith("http://")}
        try:
            self._store = S3Store(
                source.bucket, client_options=client, retry_config=_RETRIES, **options
            )
        except Exception as error:  # its classes come with the library, as below
            raise self._told(error) from None

    def list_files(self, limits: Limits) -> tuple[RemoteFile, ...]:
        """The files of a model folder under the prefix, by name; the rest is left there."""
        listed = list(self._listed())
        if not listed:
            raise ModelStoreError("source_missing", f"There is nothing under {self.where}.")
        files = sorted(file for file in listed if _is_of_a_model(file.name))
        for file in files:
            self._check_object(file)
        check_files([(file.name, file.size) for file in files], limits, self.where)
        return tuple(files)

    def chunks(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """The file's bytes from `offset` on, as long as it is the one that was listed."""
        options: Any = {"if_match": file.etag}
        if offset:
            options["range"] = {"offset": offset}
        try:
            answer = self._store.get(self._source.key(file.name), options=options)
            for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)
        except Exception as error:
            raise self._told(error, file.name) from None

    def _listed(self) -> Iterator[RemoteFile]:
        start = self._source.key("")
        count = 0
        try:
            for page in self._store.list(self._source.prefix or None):
                count += len(page)
                if count > MAX_OBJECTS:
                    text = f"There are more than {MAX_OBJECTS} objects under {self.where}."
                    raise ModelStoreError("too_large", text)
                for one in page:
                    if one["path"].startswith(start):  # else the marker of the folder itself
                        name = one["path"].removeprefix(start)
                        yield RemoteFile(name, one["size"], one["e_tag"] or "")
        except ModelStoreError:
            raise
        except Exception as error:
            raise self._told(error) from None

    def _check_object(self, file: RemoteFile) -> None:
        if not stays_inside(file.name):
            text = f"A name under {self.where} leaves the folder: {file.name[:200]!r}."
            raise ModelStoreError("archive_rejected", text)
        if not file.etag:
            text = f"The server of {self.where} tells no ETag, by which changes are noticed."
            raise ModelStoreError("download_failed", text)

    def _told(self, error: Exception, name: str = "") -> ModelStoreError:
        """The sentence for what a client's exception means; never its own text."""
        text, kind = str(error), type(error).__name__
        status = (_STATUS.findall(text) or [""])[0]
        code = (_CODE.findall(text) or [""])[0]
        log.warning("s3_refused", wanted=self.where, name=name, kind=kind, status=status, code=code)
        if kind == "InvalidPathError":
            said = f"A name under {self.where} has an empty part, '.' or '..' in it."
            return ModelStoreError("archive_rejected", said)
        if name and (status in ("404", "412") or kind in ("PreconditionError", "NotFoundError")):
            said = f"{name} under {self.where} was changed while it was fetched."
            return ModelStoreError("download_failed", said)
        if status == "404":
            return ModelStoreError("source_missing", f"There is no bucket of {self.where}.")
        if status in ("401", "403") or "MissingSecretAccessKey" in text:
            return self._denied()
        if code in _ELSEWHERE or "configured region" in text:
            said = f"{self.where} lies in another region than AWS_REGION says."
            return ModelStoreError("download_failed", said)
        answer = f"answered {status} {code}".rstrip() if status else "did not answer"
        return ModelStoreError("download_failed", f"The server of {self.where} {answer}.")

    def _denied(self) -> ModelStoreError:
        if self._is_anonymous:
            said = f"{self.where} is not public, and the agent has no AWS_ACCESS_KEY_ID."
            return ModelStoreError("credentials_missing", said)
        said = f"The agent's AWS credentials do not open {self.where}."
        return ModelStoreError("access_denied", said)


def stays_inside(name: str) -> bool:
    """Whether a name, as a path, stays in the folder that it is joined to."""
    path = PurePosixPath(name)
    is_plain = name.isprintable() and "\\" not in name and path.as_posix() == name
    return is_plain and not path.is_absolute() and ".." not in path.parts


def _is_of_a_model(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in MODEL_PATTERNS)


def fetch_files(
    bucket: Bucket, files: Sequence[RemoteFile], target: Path, progress: Progress
) -> None:
    """Fill `target` with the files, but for what an earlier try with the same listing left there.

    A file is `NAME.part` until it is whole. `progress` may raise: the next try goes on from there.
    """
    total = sum(file.size for file in files)
    try:
        done = sum(_held(target / file.name) for file in files)
        _check_disk(target, total - done)
        progress("download", done / max(total, 1))
        for file in files:
            for grown in _fetch_file(bucket, file, target / file.name):
                done += grown
                progress("download", min(done / max(total, 1), 1.0))
    except OSError as error:
        raise _unwritten(bucket.where, error) from error


def _fetch_file(bucket: Bucket, file: RemoteFile, path: Path) -> Iterator[int]:
    """Bring one file; yields by how many bytes more of it is there, or fewer."""
    if path.exists():
        return
    part = _part(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    offset = _held(path)
    yield from _append(bucket, file, part, offset)
    if offset and not _has_tag(part, file.etag):
        part.unlink()
        yield -file.size
        yield from _append(bucket, file, part, 0)
    part.rename(path)


def _append(bucket: Bucket, file: RemoteFile, part: Path, offset: int) -> Iterator[int]:
    with part.open("ab") as out:
        out.truncate(offset := min(offset, file.size))
        if offset < file.size:
            for chunk in bucket.chunks(file, offset):
                out.write(chunk)
                yield len(chunk)
        out.flush()
        os.fsync(out.fileno())
    if part.stat().st_size != file.size:
        part.unlink()
        said = f"{file.name} under {bucket.where} is not of the size that was listed."
        raise ModelStoreError("download_failed", said)


def _has_tag(part: Path, etag: str) -> bool:
    """Whether a file that was gone on with is what its tag says; True where the tag is no MD5.

    It is one for objects stored in one request and not under a key of a key service, which makes
    the tag of other bytes. So a file fetched in one go is not held against it.
    """
    tag = _MD5_TAG.fullmatch(etag)
    if tag is None:
        return True
    with part.open("rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == tag[1]


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _held(path: Path) -> int:
    """Bytes of a file that are on disk already."""
    found = next((one for one in (path, _part(path)) if one.is_file()), None)
    return found.stat().st_size if found else 0


def _check_disk(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        said = f"The model needs {needed} bytes more, and the model cache's disk has {free}."
        raise ModelStoreError("insufficient_disk", said)


def _unwritten(where: str, error: OSError) -> ModelStoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelStoreError("insufficient_disk", "The model cache's disk is full.")
    return ModelStoreError("download_failed", f"{where} could not be written: {error.strerror}.")
