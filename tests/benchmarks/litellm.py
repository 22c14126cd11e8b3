"""LiteLLM's proxy in front of an upstream that costs nothing, for comparison.

It runs with one worker, one key and its production settings, from an environment of its own under
``~/.cache/engine-bench`` that is installed when first needed (``litellm[proxy]``, some minutes).
"""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.natsserver import free_port
from tests.openai.stack import until

CACHE = Path.home() / ".cache" / "engine-bench" / "litellm"
KEY = "sk-bench"
PROBE = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ENVIRONMENT = {
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class LiteLlm:
    """Answers on ``port`` when constructed."""

    def __init__(self, directory: Path, path: str) -> None:
        python = _install()
        self._upstream_port, self.port, self._path = free_port(), free_port(), path
        upstream = [sys.executable, "-m", "tests.benchmarks.fake_openai", str(self._upstream_port)]
        self._processes = [subprocess.Popen(upstream)]
        config = directory / "litellm.yaml"
        config.write_text(self._config())
        log = (directory / "litellm.log").open("wb")
        command = [str(python.with_name("litellm")), "--config", str(config), "--port"]
        command += [str(self.port), "--host", "127.0.0.1", "--num_workers", "1"]
        environment = os.environ | ENVIRONMENT
        self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        until(self._answers, 180, 1)

    def _config(self) -> str:
        base = f"http://127.0.0.1:{self._upstream_port}/v1"
        parameters = {"model": "openai/fake", "api_base": base, "api_key": "x"}
        return json.dumps(
            {
                "model_list": [{"model_name": "fake", "litellm_params": parameters}],
                "general_settings": {"master_key": KEY},
                "litellm_settings": {"set_verbose": False, "request_timeout": 600},
            }
        )

    def _answers(self) -> bool:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        url = f"http://127.0.0.1:{self.port}{self._path}"
        request = urllib.request.Request(url, json.dumps(PROBE).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _install() -> Path:
    python = CACHE / "bin" / "python"
    if not python.with_name("litellm").exists():
        subprocess.run([sys.executable, "-m", "venv", str(CACHE)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "litellm[proxy]"], check=True)
    return python
