"""SHA-256 of a model folder.

A folder's digest is the SHA-256 of its sorted listing, one line per file:

    <sha256 of the file>  <path inside the folder>\\n

which is what `sha256sum` prints, so the digest can be recomputed by hand:

    cd model && find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of one file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """Relative path to hex SHA-256, of every regular file under `folder`."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): file_sha256(p) for p in paths}


def folder_sha256(files: Mapping[str, str]) -> str:
    """The folder's digest, from `hash_files`."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def folder_bytes(folder: Path) -> int:
    """Sum of the sizes of the regular files under `folder`."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
