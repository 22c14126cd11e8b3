"""Where an export goes: a folder, a bucket (``s3://``), or somebody's HTTP endpoint.

A folder and a bucket take whole files under their names. An endpoint gets each part as a POST, at
least once and in order: the position up to which everything was accepted is kept in the manifest,
which stays here, and a part whose answer was lost is sent again under the same key::

    POST https://siem.example/ingest      Idempotency-Key: part-00002.jsonl-<sha256>
                                          X-Export-Name: part-00002.jsonl
"""

import os
import time
import urllib.error
import urllib.request
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from controlplane.application.exports import MANIFEST, Destination, ExportError

_TRIES, _PAUSE_S, _TIMEOUT_S = 6, 0.25, 30.0


class Folder:
    """Files appear whole: written beside, synced, renamed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExportError(f"{path} cannot be made: {error.strerror}") from error

    def put(self, name: str, content: bytes) -> None:
        fresh = self._path / f".{name}.new"
        try:
            with fresh.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self._path / name)
        except OSError as error:
            raise ExportError(f"{self._path / name} cannot be written: {error.strerror}") from error

    def get(self, name: str) -> bytes | None:
        path = self._path / name
        return path.read_bytes() if path.exists() else None


class Bucket:
    """An object store under a prefix; ``store`` is one of obstore's."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._store, self._prefix = store, f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    @classmethod
    def s3(cls, url: str, **options: Any) -> "Bucket":
        """``s3://bucket/prefix``; credentials and endpoint from the usual AWS_ variables."""
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise ExportError(
                "s3:// needs obstore: pip install 'engine-controlplane[export]'"
            ) from error
        parts = urlsplit(url)
        return cls(S3Store(parts.netloc, **options), parts.path)

    def put(self, name: str, content: bytes) -> None:
        try:
            self._store.put(self._prefix + name, content)
        except Exception as error:  # its own classes are only there with the library
            raise ExportError(f"{name} was not stored: {error}") from error

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._store.get(self._prefix + name).bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            raise ExportError(f"{name} cannot be read: {error}") from error


class Endpoint:
    """POSTs everything to ``url``; ``state`` keeps the manifest, which is the cursor."""

    def __init__(self, url: str, state: Folder) -> None:
        self._url, self._state = url, state

    def put(self, name: str, content: bytes) -> None:
        key = f"{name}-{sha256(content).hexdigest()}"
        headers = {
            "Content-Type": "application/octet-stream",
            "X-Export-Name": name,
            "Idempotency-Key": key,
        }
        self._post(urllib.request.Request(self._url, content, headers, method="POST"))
        if name == MANIFEST:
            self._state.put(name, content)

    def get(self, name: str) -> bytes | None:
        return self._state.get(name)

    def _post(self, request: urllib.request.Request) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
                    return
            except urllib.error.HTTPError as error:
                with suppress(OSError):
                    error.read()
                if error.code < 500 and error.code != 429:
                    raise ExportError(f"{self._url} answered {error.code}") from error
                failure: Exception = error
            except OSError as error:
                failure = error
            if attempt < _TRIES:
                time.sleep(_PAUSE_S * 2**attempt)
        raise ExportError(f"{self._url} took nothing in {_TRIES} tries: {failure}")


def destination_of(where: str, state: Path | None = None) -> Destination:
    """``where`` is a folder, ``s3://bucket/prefix`` or an http(s) URL; raises ExportError."""
    if where.startswith("s3://"):
        return Bucket.s3(where)
    if where.startswith(("http://", "https://")):
        if state is None:
            raise ExportError("An endpoint needs --state DIR, where the cursor is kept.")
        return Endpoint(where, Folder(state))
    if "://" in where:
        raise ExportError(f"There is no way to {where.partition(':')[0]}://")
    return Folder(Path(where))
