"""Compile the C++ kernels once per machine, or say why not.

The library is plain C behind ctypes, with no torch headers: it compiles in half a minute of one
core and does not depend on torch's C++ version. It is kept in a cache folder under a name that
is a hash of everything that decides its contents,

    ~/.cache/engine-kernels/decoder-3f9c2a41b0d7.so    sources + compiler version + CPU flags

so a changed source, a new compiler or another processor on a shared home folder each get their
own file, and nothing is ever overwritten. Of several workers that start at once one compiles and
the others wait for it: two on two cores would take twice as long. What a killed one has left is
removed by the next.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
COMPILERS = ("g++", "clang++", "c++")
COMPILE_SECONDS = 120
_UNFINISHED = "unfinished-"
CACHE_VARIABLE = "ENGINE_KERNEL_CACHE"
SWITCH_VARIABLE = "ENGINE_KERNELS"  # "torch" switches the kernels off


class KernelsUnavailable(Exception):
    """The kernels cannot be used here; the message says why."""


@cache
def kernels() -> ctypes.CDLL:
    """The compiled library; raises KernelsUnavailable."""
    if os.environ.get(SWITCH_VARIABLE) == "torch":
        raise KernelsUnavailable(f"{SWITCH_VARIABLE}=torch")
    path = _library(_compiler())
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(str(error)) from error
    return _declare(library)


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    for name in names:
        if found := shutil.which(name):
            return found
    raise KernelsUnavailable(f"no C++ compiler: none of {', '.join(names)} is installed")


def _library(compiler: str) -> Path:
    folder = Path(os.environ.get(CACHE_VARIABLE, "~/.cache/engine-kernels")).expanduser()
    path = folder / f"decoder-{_key(compiler)}.so"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                if not path.exists():
                    _compile(compiler, path)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"{type(error).__name__}: {error}") from error
    return path


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Until nobody else compiles; the kernel gives a dead process's lock back."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _key(compiler: str) -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.read_bytes())
    digest.update(_output(compiler, "--version"))
    digest.update(_cpu_flags())
    return digest.hexdigest()[:12]


def _cpu_flags() -> bytes:
    """What -march=native sees of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return os.uname().machine.encode()
    wanted = (b"flags", b"Features", b"model name")
    return b"\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _output(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS, check=True).stdout


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder:
        made = Path(folder) / path.name
        source = str(SOURCES / "decoder.cpp")
        command = [compiler, *FLAGS, "-o", str(made), source]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        if done.returncode:
            raise KernelsUnavailable(f"{compiler} failed: {done.stderr.strip()[:500]}")
        made.rename(path)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "team_new": [ctypes.c_int],
        "team_delete": [pointer],
        "kernels": [],
        "advise_huge": [pointer, number],
        "pack_floats": [pointer, pointer, number, number, pointer],
        "pack_int8s": [pointer, pointer, number, number, pointer, pointer],
        "decoder_forward": [pointer] * 4,
        "decoder_logits": [pointer, pointer, pointer, pointer, number, pointer],
        "linear_run": [pointer, pointer, pointer, pointer, number, pointer],
    }
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    library.team_new.restype = pointer
    library.kernels.restype = ctypes.c_char_p
    return library
