"""The whole product under a mixed load of more models than its device holds.

Part `fleet` of `tests.benchmarks.residency`: `manage.py demo` with one device, on which its own
model (SmolLM2-135M, int8, resident) leaves room for some of four swappable ones: the same weights
in float32, in int8, in float32 with a quarter of the context, and all-MiniLM-L6-v2, which embeds::

    device 2.7 GiB       smollm2 1.5 GiB, always there
                         1.2 GiB for  full 1.1 + int8 0.6 + short 0.9 + minilm 0.25 = 2.85 GiB

Clients ask through the gateway, with the official client, each for a random model, the next when
the last answer is complete; every model has been asked before the baseline is taken. Whatever was
given first for a text must be given each time: greedy tokens alike, vectors to 1e-4. At the end
no KV block may be held, no worker lost, and memory must be what it was.
"""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil

from tests.e2e.product import Product, until
from tests.engine.real_model import MINILM, SMOLLM2

MIB = 1 << 20
DEVICE = "cpu:2700MiB"
DECODER = {"source": SMOLLM2, "max_batch": 4, "max_output_tokens": 256}
MODELS: dict[str, dict[str, Any]] = {
    "full": {**DECODER, "gpu_memory": 1100 * MIB, "max_prompt_tokens": 1792},
    "int8": {**DECODER, "gpu_memory": 600 * MIB, "max_prompt_tokens": 1792, "quantization": "int8"},
    "short": {**DECODER, "gpu_memory": 900 * MIB, "max_prompt_tokens": 256},
    "minilm": {"source": MINILM, "task": "embed", "gpu_memory": 256 * MIB,
               "max_prompt_tokens": 256},
}  # fmt: skip
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Say hello in Spanish.")
NUM_CLIENTS, MAX_TOKENS = 4, 16
NUM_FIRST = 2  # questions to each model before the baseline
MAX_DIFFERENCE = 1e-4  # of a vector's numbers: the sums of another batch round differently
Figures = dict[str, float]


def start(folder: Path, model_cache: Path) -> Product:
    """The demo on one small device; use as a context manager."""
    return Product(folder, "--devices", DEVICE, "--model-cache", str(model_cache))


def register(product: Product) -> None:
    """Add the four over REST, and wait until each is placed."""
    for name, spec in MODELS.items():
        product.post("models/", {"name": name})
        spec = {"version": "v1", "residency": "swappable", **spec}
        product.post(f"models/{name}/versions/", spec)
    wanted = {f"{name}@v1" for name in MODELS}
    until(lambda: wanted <= {row["version_id"] for row in desired(product)}, 60, product.logs)
    until(lambda: all(product.placements(one) for one in wanted), 300, product.logs)


def desired(product: Product) -> list[dict[str, Any]]:
    """Placed replicas."""
    return [row for row in product.results("placements/") if row["desired"]]


@dataclass
class Load:
    """Clients and what they saw; `known` is the first answer to each question of each model."""

    product: Product
    known: dict[tuple[str, str], Any] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, seconds: float, seed: int = 0) -> None:
        """All clients for so long; each finishes what it has begun."""
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for running in [pool.submit(self._client, end, seed + n) for n in range(NUM_CLIENTS)]:
                running.result()

    def ask_all(self) -> None:
        """Each model a few questions, one after the other."""
        with self.product.openai(timeout=300.0) as client:
            for question in QUESTIONS[:NUM_FIRST]:
                for name in MODELS:
                    self._ask(client, name, question)

    def _client(self, end: float, seed: int) -> None:
        rng = random.Random(seed)
        with self.product.openai(timeout=300.0) as client:
            while time.monotonic() < end:
                self._ask(client, rng.choice(sorted(MODELS)), rng.choice(QUESTIONS))

    def _ask(self, client: openai.OpenAI, name: str, question: str) -> None:
        started = time.monotonic()
        try:
            answer = answered(client, name, question)
        except openai.OpenAIError as error:
            with self._lock:
                self.errors[f"{name}: {getattr(error, 'code', '') or type(error).__name__}"] += 1
            return
        with self._lock:
            self.longest_s = max(self.longest_s, time.monotonic() - started)
            self.done[name] += 1
            first = self.known.setdefault((name, question), answer)
            self.done["changed"] += not is_same(first, answer)


def answered(client: openai.OpenAI, name: str, question: str) -> Any:
    """A text, or a vector."""
    if "task" in MODELS[name]:
        return np.array(client.embeddings.create(model=name, input=question).data[0].embedding)
    messages: Any = [{"role": "user", "content": question}]
    made = client.chat.completions.create(
        model=name, messages=messages, max_tokens=MAX_TOKENS, temperature=0
    )
    return made.choices[0].message.content


def is_same(first: Any, again: Any) -> bool:
    """Texts alike, vectors all but."""
    if isinstance(first, str):
        return bool(first == again)
    return bool(np.abs(first - again).max() <= MAX_DIFFERENCE)


# --- what is left -------------------------------------------------------------------------------
def resident_mib(product: Product) -> float:
    """Of the agent and its workers."""
    agent = psutil.Process(product.pids["gpuagent-1"])
    return sum(p.memory_info().rss for p in [agent, *product.workers()]) / MIB


def agent_metrics(product: Product) -> dict[str, float]:
    """The agent's own page, each metric summed over its labels."""
    port = product.port("gpuagent-1")
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=10).text
    sums: Counter[str] = Counter()
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            sums[name.partition("{")[0]] += float(value)
    return sums


def at_rest(product: Product) -> dict[str, float]:
    """The agent's metrics once nothing runs, waits or is held, and no KV block is held."""
    busy = ("num_requests_running", "num_requests_waiting", "num_requests_held")
    names = (*busy, "node_gpu_kv_used_bytes")

    def quiet() -> dict[str, float] | None:
        found = agent_metrics(product)
        return found if not any(found[f"engine:{name}"] for name in names) else None

    until(quiet, 20, product.logs)
    time.sleep(3)  # a report later still
    return agent_metrics(product)


def measure(product: Product, seconds: float) -> Figures:
    """Register, warm up, load for `seconds`, and compare with the baseline."""
    register(product)
    load = Load(product)
    load.ask_all()
    load.run(min(seconds, 20.0), seed=100)  # each has been under load, and used its workspace
    at_rest(product)
    before, pids = resident_mib(product), {each.pid for each in product.workers()}
    load.done["changed"] = 0
    started, so_far = time.time(), Counter(load.done)
    load.run(seconds)
    rest = at_rest(product)
    log = (product.data_dir / "logs" / "gpuagent-1.log").read_text(errors="replace")
    answers = load.done - so_far
    return {
        **{f"fleet_answers_{name}": float(answers[name]) for name in MODELS},
        "fleet_answers_per_s": sum(answers[name] for name in MODELS) / (time.time() - started),
        "fleet_errors": float(load.errors.total()),
        "fleet_answers_changed": float(load.done["changed"]),
        "fleet_longest_s": load.longest_s,
        "fleet_swaps": float(log.count("replica_swapped")),
        "fleet_workers_lost": float(len(pids - {each.pid for each in product.workers()})),
        "fleet_records_not_ok": float(sum(one["outcome"] != "ok" for one in records(product))),
        "fleet_kv_held_bytes": rest["engine:node_gpu_kv_used_bytes"],
        "fleet_resident_mib_before": before,
        "fleet_resident_mib_after": resident_mib(product),
    }


def records(product: Product) -> list[dict[str, Any]]:
    """Of requests for the four."""
    wanted = {f"{name}@v1" for name in MODELS}
    return [one for one in product.results("requests/") if one["version_id"] in wanted]


def check(figures: Figures) -> None:
    """Raise AssertionError for an error, a changed answer, a lost worker, or a leak."""
    for name in ("errors", "answers_changed", "workers_lost", "records_not_ok", "kv_held_bytes"):
        assert figures[f"fleet_{name}"] == 0, (name, figures)
    assert all(figures[f"fleet_answers_{name}"] for name in MODELS), figures
    assert figures["fleet_swaps"] > 0, "the device holds them all, so nothing was tried"
    growth = figures["fleet_resident_mib_after"] / figures["fleet_resident_mib_before"]
    assert growth < 1.05, figures
