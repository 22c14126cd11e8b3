"""Open a folder of safetensors files and hand out its tensors, mapped, not copied.

The safetensors library checks offsets and lengths; it accepts duplicate names, names like
`../../x`, 100,000 empty tensors and NaN weights, so those are checked here after it.
Nothing but safetensors is ever opened.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpuagent.models.config import read_json
from gpuagent.models.errors import LoadError
from gpuagent.models.mapping import MappedFiles

MAX_TENSORS = 100_000
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 64 << 20
TENSOR_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
STORED_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
PACKED_SUFFIXES = (".qweight", ".qzeros")  # of AWQ checkpoints; any bits are sound
COUNTING = ".position_ids"  # 0, 1, 2 ..., stored by old encoders, computed here
FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".gguf", ".h5", ".msgpack")
Cut = Callable[[str, torch.Tensor], torch.Tensor]
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def load_tensors(folder: Path, cut: Cut | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a model folder by name, as read-only views of the mapped files.

    `cut` gives the part of a tensor that is wanted, by its name; the rest is not read. Raises
    LoadError: weights_malformed, weights_rejected, manifest_invalid or format_not_allowed.
    """
    expected = _files(folder)
    tensors: dict[str, torch.Tensor] = {}
    for path, names in expected.items():
        found = dict(_open_tensors(path, cut or _whole))
        if names is not None and set(found) != names:
            raise LoadError("manifest_invalid", f"{path.name} does not hold what the index says")
        MappedFiles().forget(found.values())  # checked; read again when they are used
        tensors |= found
    return tensors


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to open, each with the tensor names an index claims for it."""
    if (folder / "model.safetensors.index.json").exists():
        return _indexed_files(folder)
    if (folder / "model.safetensors").exists():
        return {_plain_file(folder, "model.safetensors"): None}
    foreign = [p.name for p in folder.iterdir() if p.suffix in FOREIGN_SUFFIXES]
    if foreign:
        raise LoadError("format_not_allowed", f"only safetensors load, found {foreign[:5]}")
    raise LoadError("manifest_invalid", "the folder holds no model.safetensors")


def _indexed_files(folder: Path) -> dict[Path, set[str] | None]:
    index = read_json(folder / "model.safetensors.index.json", MAX_INDEX_BYTES, "manifest_invalid")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError("manifest_invalid", "the index has no weight_map")
    files: dict[Path, set[str] | None] = {}
    by_file: dict[Any, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise LoadError("manifest_invalid", f"the file of {name!r:.80} is not a name")
        by_file.setdefault(file, set()).add(name)
    for file, names in by_file.items():
        files[_plain_file(folder, file)] = names
    return files


def _plain_file(folder: Path, name: str) -> Path:
    """A regular file directly in the folder; links and paths are refused."""
    path = folder / name
    if not FILE_NAME.fullmatch(name) or path.is_symlink() or not path.is_file():
        raise LoadError("manifest_invalid", f"{name!r:.80} is not a plain file of the folder")
    return path


def _whole(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _open_tensors(path: Path, cut: Cut) -> Iterator[tuple[str, torch.Tensor]]:
    with path.open("rb") as stream:
        if stream.read(4).startswith(PICKLE_STARTS):
            raise LoadError("format_not_allowed", f"{path.name} is a pickle or an archive")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            _check_header(path)
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, _checked(name, cut(name, file.get_tensor(name)))
    except (SafetensorError, OSError) as error:
        raise LoadError("weights_malformed", f"{path.name}: {error}") from error


def _check_header(path: Path) -> None:
    """What safetensors lets pass: duplicate, too many or strange names."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER_BYTES:
            raise LoadError("weights_malformed", f"a header of {length} bytes")
        text = stream.read(length)
    pairs = json.loads(text, object_pairs_hook=list)  # a dict would hide duplicates
    names = [name for name, _ in pairs if name != "__metadata__"]
    if len(names) > MAX_TENSORS:
        raise LoadError("weights_rejected", f"{len(names)} tensors")
    if len(set(names)) != len(names):
        raise LoadError("weights_rejected", "a tensor name occurs twice")
    if strange := [name for name in names if not TENSOR_NAME.fullmatch(name)]:
        raise LoadError("weights_rejected", f"tensor name {strange[0]!r:.80}")


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype == torch.int32 and name.endswith(PACKED_SUFFIXES):
        return tensor
    if tensor.dtype == torch.int64 and name.endswith(COUNTING):
        return tensor
    if tensor.dtype not in STORED_DTYPES:
        raise LoadError("weights_rejected", f"{name} is stored as {tensor.dtype}")
    # The sum is one pass without a temporary; only a sum that overflowed needs the exact test.
    total = tensor.sum(dtype=torch.float32)
    if not torch.isfinite(total) and not torch.isfinite(tensor).all():
        raise LoadError("weights_rejected", f"{name} holds NaN or infinite values")
    return tensor
