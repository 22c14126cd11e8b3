"""Files for this user only, written whole or not at all: secrets, credentials, ready.json.

Two processes may start at once on an empty data folder and both want a key there. Each writes its
own beside it and links it into place; the second link fails, so both read the first one's::

    a: key.f3k.new written                  b: key.w0z.new written
    a: link key.f3k.new -> key  done        b: link key.w0z.new -> key  exists already
    both read key

Rejected: creating the file exclusively and then writing it. Whoever comes in between reads nothing.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_private(path: Path, text: str) -> Path:
    """Replace ``path`` in one step, durable and readable by this user only; returns it."""
    os.replace(_written_beside(path, text), path)
    return path


def kept_private(path: Path, make: Callable[[], str]) -> str:
    """The text in ``path``, made on first use; of two processes at once the first one wins."""
    if not path.exists():
        fresh = _written_beside(path, make())
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
    return path.read_text().strip()


def _written_beside(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(".new", f"{path.name}.", path.parent)  # mode 0600
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
