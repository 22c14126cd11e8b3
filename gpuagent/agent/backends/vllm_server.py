"""vLLM's OpenAI server as a child process: its command, its environment, its start and its end.

It runs in a virtual environment of its own, whose Python is the agent's setting ``vllm_python``,
on a Unix socket in a folder that only this user can open, under a key drawn for it::

    worker  --stdin-->  leash  -->  vllm.entrypoints.openai.api_server --uds FOLDER/s ...
    ...     <--stdout and stderr, of which the last lines are kept

The leash ends all of it when the worker closes the pipe or dies (``gpuagent.agent.leash``). Of a
start that fails the first exception in the output is told, for the last one is often no more than
that another process has failed.
"""

import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpuagent.agent import leash
from gpuagent.agent.backends.base import LoadError

SERVER = "vllm.entrypoints.openai.api_server"
MODEL = "model"  # the name under which it serves; whose it is nobody there needs to know
POLL_S = 0.25
KEPT_LINES = 200
EXCEPTION = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception|Interrupt): .+)")
NOT_PASSED_ON = ("ENGINE_", "PYTHON", "VIRTUAL_ENV", "VLLM_API_KEY", "AWS_")


@dataclass(frozen=True, slots=True)
class Launch:
    """What one server is started with; ``kv_bytes`` and lengths as vLLM counts them."""

    python: str
    model: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    kv_bytes: int
    threads: int
    options: tuple[str, ...] = ()

    def command(self, socket: Path) -> list[str]:
        """The child's command line. The key is not in it: command lines can be read by anybody."""
        named = {
            "--model": str(self.model),
            "--served-model-name": MODEL,
            "--uds": str(socket),
            "--dtype": self.dtype,
            "--load-format": "safetensors",
            "--generation-config": "vllm",  # no defaults of the folder's: every request says all
            "--max-model-len": str(self.max_model_len),
            "--max-num-seqs": str(self.max_num_seqs),
            "--max-num-batched-tokens": str(max(self.max_batch_tokens, self.max_num_seqs)),
            "--kv-cache-memory-bytes": str(self.kv_bytes),
            "--scheduling-policy": "priority",
            "--uvicorn-log-level": "warning",
        }
        words = [word for pair in named.items() for word in pair]
        flags = ("--enable-prefix-caching", "--enable-prompt-tokens-details")
        return [self.python, "-m", SERVER, *words, *flags, *self.options]

    def environment(self, folder: str, key: str, base: Mapping[str, str]) -> dict[str, str]:
        """The agent's own without its settings and its Python; nothing is asked of any hub."""
        kept = {name: text for name, text in base.items() if not name.startswith(NOT_PASSED_ON)}
        threads = {"OMP_NUM_THREADS": str(self.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        own = {"TMPDIR": folder, "VLLM_API_KEY": key}
        # Some of its sampling is compiled when it is first asked for, for half a minute on a CPU.
        eager = {"TORCH_COMPILE_DISABLE": "1"} if "--enforce-eager" in self.options else {}
        return {**kept, **threads, **offline, **eager, **own}


class Server:
    """One child, from its start on; everything here may be called from any thread."""

    def __init__(self, launch: Launch) -> None:
        """Start it; raises LoadError ``engine_unavailable`` where there is no such Python."""
        if not os.access(launch.python, os.X_OK):
            raise LoadError("engine_unavailable", f"there is no vLLM at {launch.python!r}")
        folder = tempfile.mkdtemp(prefix="vllm-")
        self.socket = Path(folder, "s")
        self.key = secrets.token_urlsafe(32)
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._leash = subprocess.Popen(
            [sys.executable, "-I", leash.__file__, folder, *launch.command(self.socket)],
            cwd=folder,  # which Python puts before its own packages
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=launch.environment(folder, self.key, os.environ),
            start_new_session=True,  # a kill of the worker's group must leave it to do its work
        )
        self._reader = threading.Thread(target=self._keep_lines, daemon=True, name="vllm output")
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._leash.poll()

    def await_ready(self, is_ready: Callable[[], bool], limit_s: float) -> None:
        """Wait until it answers; raises LoadError if it ends first or takes too long."""
        give_up = time.monotonic() + limit_s
        while not is_ready():
            if self.exit_code is not None:
                self._reader.join(1.0)
                raise _failure(self.exit_code, list(self._lines))
            if time.monotonic() > give_up:
                self.close()
                raise LoadError("engine_start_timeout", f"not ready after {limit_s:g} s")
            time.sleep(POLL_S)

    def pidfd(self) -> int:
        """A descriptor that can be read once it has ended."""
        return os.pidfd_open(self._leash.pid)

    def describe_end(self) -> str:
        """How it ended, for people."""
        code = self.exit_code
        if code is None:
            return "vLLM does not answer"
        how = f"was ended by signal {code - 128}" if code > 128 else f"exited with code {code}"
        return f"vLLM {how}"

    def close(self) -> None:
        """End it and all its processes; returns when they are gone."""
        if self._leash.stdin:
            with suppress(OSError):
                self._leash.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._leash.wait(10.0)

    def _keep_lines(self) -> None:
        assert self._leash.stdout is not None
        for line in self._leash.stdout:
            self._lines.append(line.decode(errors="replace").rstrip())


def _failure(code: int, lines: list[str]) -> LoadError:
    reason = failure_reason(lines)
    if "No module named" in reason and "vllm" in reason:
        return LoadError("engine_unavailable", f"vLLM is not installed there: {reason}")
    return LoadError("engine_start_failed", f"vLLM exited with code {code}: {reason}")


def failure_reason(lines: Iterable[str]) -> str:
    """The first exception that the output names, else its last line."""
    said = [line for line in lines if line.strip()]
    found = (EXCEPTION.search(line) for line in said)
    first = next((match[1] for match in found if match), "")
    return first or (said[-1].strip() if said else "it said nothing")
