"""Secrets on disk: whole, of one mind, and for their user only."""

import itertools
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from controlplane.adapters.private_files import kept_private, write_private


def test_all_who_start_at_once_keep_the_same_secret(tmp_path: Path) -> None:
    """Nobody reads a half-written or an empty one, and nothing is left beside it."""
    path = tmp_path / "data" / "key"
    numbers = itertools.count()

    def start(_: int) -> str:
        return kept_private(path, lambda: f"secret-{next(numbers)}" * 1000)

    with ThreadPoolExecutor(16) as threads:
        kept = set(threads.map(start, range(64)))
    assert len(kept) == 1 and kept == {path.read_text()}
    assert list(path.parent.iterdir()) == [path]


def test_it_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert kept_private(path, lambda: "first") == "first"
    assert kept_private(path, lambda: "second") == "first"


def test_what_is_replaced_is_private_too(tmp_path: Path) -> None:
    """Also where the old one was open to all."""
    path = tmp_path / "ready.json"
    path.write_text("old")
    path.chmod(0o644)
    assert write_private(path, "new") == path
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
