"""A disk whose power can be cut: ext4 on a loop device over a file.

What a process wrote lies in the page cache of the mounted file system; what was flushed (fsync, or
the kernel's own writing back) lies in the image file. So a copy of the image file, taken while all
writers stand still, is what a machine finds after its power went::

    disk/engine.sqlite3   write, write, fsync, write      the page cache has it all
    disk.img              write, write, fsync             a copy of it lacks the last write

The file system's own timer is set to ten minutes, so that nothing but fsync puts anything there.
Controllers that acknowledge a flush and lose it are beyond this, and so is a torn sector.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

OPTIONS = "loop,commit=600,noatime"


def why_not() -> str:
    """Why no power can be cut here; empty if it can."""
    if os.geteuid() != 0:
        return "a loop mount needs root"
    if missing := [name for name in ("mkfs.ext4", "mount", "umount") if not _where(name)]:
        return f"{', '.join(missing)}: not installed"
    return _tried()


@cache
def _tried() -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Disk(Path(folder), 8).mounted():
                return ""
        except subprocess.CalledProcessError as error:
            return f"no loop mount on this machine: {error.stderr.decode().strip()}"


def _where(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def call(name: str, *arguments: str | Path) -> None:
    where = _where(name)
    assert where is not None
    subprocess.run([where, *arguments], check=True, capture_output=True, timeout=60)


def flush(where: Path) -> None:
    """Everything in this file system, and in no other, onto its disk."""
    call("sync", "--file-system", where)


def stand_still(pids: list[int]) -> None:
    """Stop these processes, and wait until each of their threads has stopped."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not all(map(_stopped, pids)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {pids} stopped")
        time.sleep(0.001)


def _stopped(pid: int) -> bool:
    states = [
        thread.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        for thread in Path(f"/proc/{pid}/task").iterdir()
    ]
    return set(states) <= {"T", "Z"}


class Disk:
    """A new, empty file system of ``megabytes``, its image in ``folder``."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.image = folder / "disk.img"
        with self.image.open("wb") as file:
            file.truncate(megabytes * 1024 * 1024)
        call("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1", self.image)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        with mounted(self.image, self.image.with_suffix(".mnt")) as where:
            yield where

    def cut(self, number: int = 0) -> Path:
        """What the disk holds now; call it while nobody writes. A copy, to be mounted."""
        copy = self.image.with_name(f"cut{number}.img")
        call("cp", "--sparse=always", self.image, copy)
        return copy


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    call("mount", "-o", OPTIONS, image, where)
    try:
        yield where
    finally:
        call("umount", "--lazy", where)


@contextmanager
def tmpfs(where: Path, megabytes: int) -> Iterator[Path]:
    """A file system that is full after ``megabytes``."""
    where.mkdir(exist_ok=True)
    call("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", where)
    try:
        yield where
    finally:
        call("umount", "--lazy", where)
