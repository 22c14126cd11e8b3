"""What vLLM tells of itself at its ``/metrics``, as far as it is read here."""

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

METRIC = re.compile(r"^vllm:(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Figures:
    """What vLLM's ``/metrics`` says; ``told`` are all its lines, to see that something moves."""

    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    num_blocks: int = 0
    block_size: int = 0
    told: str = ""


def read_figures(text: str) -> Figures:
    """The figures in an exposition of vLLM's; what is missing is 0."""
    values: defaultdict[str, float] = defaultdict(float)
    labels: dict[str, str] = {}
    for name, found, value in METRIC.findall(text):
        with suppress(ValueError):
            values[name] += float(value)
        if name == "cache_config_info":
            labels = dict(LABEL.findall(found))
    num_blocks, block_size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return Figures(
        num_waiting=int(values["num_requests_waiting"]),
        kv_usage=float(values["kv_cache_usage_perc"]),
        num_preemptions=int(values["num_preemptions_total"]),
        num_blocks=int(num_blocks) if num_blocks.isdigit() else 0,
        block_size=int(block_size) if block_size.isdigit() else 0,
        told="\n".join(line for line in text.splitlines() if line.startswith("vllm:")),
    )
