"""What guessing ahead gains alone and costs in a batch, and how fast realtime gets in.

    python -m tests.benchmarks.engine_speculation [--json FILE] [--repeats 3]

The real SmolLM2-135M. Extraction: prompts that hold a text to be repeated, greedy, so that an
n-gram lookup finds what comes next. Plain: random prompts, sampled, where it seldom does. The
same requests with and without guesses, taking turns, alone and 16 at once, medians of the repeats;
the tokens are compared. Realtime: 16 slots full of batch-class work with a line behind it, and
a realtime request every now and then; its time to the first token against a step's.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from tests.engine.real_model import real_model

NAMES = ["Amal", "Boris", "Chen", "Dana", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas"]
TOWNS = ["Lyon", "Turin", "Ghent", "Porto", "Graz", "Cork", "Malmo", "Brno", "Split", "Tartu"]
VOCAB = 49152
NUM_TOKENS = 96


def plain_prompts(num: int) -> list[tuple[int, ...]]:
    """Random tokens: what comes then is not in the prompt."""
    rng = random.Random(4)
    return [tuple(rng.randrange(100, VOCAB) for _ in range(64)) for _ in range(num)]


def extraction_prompts(num: int) -> list[tuple[int, ...]]:
    """Chat prompts that ask for lines of a table given in the prompt, to be repeated."""
    tokenizer = Tokenizer.from_file(str(real_model().path / "tokenizer.json"))
    rng, prompts = random.Random(3), []
    for _ in range(num):
        lines = [
            f"{rng.choice(NAMES)} {rng.choice(NAMES)}, order {rng.randrange(1000, 9999)}, "
            f"{rng.randrange(2, 90)} boxes, {rng.choice(TOWNS)}"
            for _ in range(10)
        ]
        table = "\n".join(lines)
        text = (
            f"<|im_start|>user\nCopy this list exactly:\n{table}<|im_end|>\n"
            f"<|im_start|>assistant\n{lines[0]}\n"
        )
        prompts.append(tuple(tokenizer.encode(text).ids))
    return prompts


def request(
    name: str,
    prompt: tuple[int, ...],
    num_tokens: int,
    latency_class: LatencyClass = LatencyClass.STANDARD,
    temperature: float = 0.0,
) -> GenerationRequest:
    """A greedy or seeded request of that many tokens."""
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=temperature, seed=7, ignore_eos=True
    )
    return GenerationRequest(name, prompt, sampling, latency_class)


def drain(engine: TorchEngine, requests: list[GenerationRequest]) -> tuple[float, dict[str, list]]:
    """Seconds of decoding, the prompts being cached before, and the tokens."""
    for each in requests:
        engine.add(request(f"{each.request_id}-prompt", each.prompt_token_ids, 1))
    while engine.has_work():
        engine.step()
    for each in requests:
        engine.add(each)
    tokens: dict[str, list] = {each.request_id: [] for each in requests}
    started = time.perf_counter()
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return time.perf_counter() - started, tokens


def speculation(
    batch: int,
    repeats: int,
    make_prompts: Callable[[int], list[tuple[int, ...]]],
    label: str,
    temperature: float,
) -> dict[str, float]:
    """Decoding time with guesses over without, for `batch` requests at once."""
    options: dict[str, Any] = {"max_num_seqs": 16}
    engines = {
        each: TorchEngine.load(real_model().path, speculation=each, **options)
        for each in ("none", "ngram")
    }
    times: dict[str, list[float]] = {each: [] for each in engines}
    num_same = num_tokens = 0
    for repeat in range(repeats + 1):
        prompts = make_prompts(batch * (repeat + 1))[-batch:]
        found = {}
        for each in random.Random(repeat).sample(list(engines), 2):
            requests = [
                request(f"{repeat}-{i}", prompt, NUM_TOKENS, temperature=temperature)
                for i, prompt in enumerate(prompts)
            ]
            seconds, found[each] = drain(engines[each], requests)
            times[each].append(seconds)
        for name, tokens in found["none"].items():
            num_tokens += len(tokens)
            num_same += sum(a == b for a, b in zip(tokens, found["ngram"][name], strict=True))
    stats = engines["ngram"].stats()
    plain, guessed = (statistics.median(times[each][1:]) for each in ("none", "ngram"))
    key = f"{label}_batch_{batch}"
    return {
        f"{key}_speed_up": plain / guessed,
        f"{key}_acceptance": stats.spec_decode_num_accepted_tokens
        / max(stats.spec_decode_num_draft_tokens, 1),
        f"{key}_num_draft_tokens": stats.spec_decode_num_draft_tokens,
        f"{key}_tokens_per_second_without": NUM_TOKENS * batch / plain,
        f"{key}_same_tokens": num_same / num_tokens,
    }


def realtime(num_arrivals: int) -> dict[str, float]:
    """Steps and milliseconds to the first token of realtime requests into batch work."""
    rng = random.Random(5)
    options: dict[str, Any] = {"max_num_seqs": 16, "kv_bytes": 128 << 20, "prefix_caching": False}
    engine = TorchEngine.load(real_model().path, **options)

    def prompt(num: int) -> tuple[int, ...]:
        return tuple(rng.randrange(100, VOCAB) for _ in range(num))

    for i in range(60):
        engine.add(request(f"b{i}", prompt(100), 200, LatencyClass.BATCH))
    for _ in range(30):
        engine.step()
    steps, times, busy_steps = [], [], []
    for i in range(num_arrivals):
        for _ in range(rng.randrange(3, 9)):
            engine.step()
            busy_steps.append(1000 * engine.stats().last_step_seconds)
        engine.add(request(f"r{i}", prompt(64), 4, LatencyClass.REALTIME))
        started, num_steps = time.perf_counter(), 0
        while True:
            num_steps += 1
            if any(output.request_id == f"r{i}" for output in engine.step()):
                break
        steps.append(num_steps)
        times.append(1000 * (time.perf_counter() - started))
    stats = engine.stats()
    times.sort()
    return {
        "realtime_steps_to_first_token_max": max(steps),
        "realtime_ttft_ms_p50": statistics.median(times),
        "realtime_ttft_ms_p99": times[int(0.99 * (len(times) - 1))],
        "batch_step_ms_p50": statistics.median(busy_steps),
        "realtime_num_swapped_out": stats.num_swapped_out,
        "realtime_num_recomputed": stats.num_recomputed,
    }


def measure(repeats: int) -> dict[str, Any]:
    """Everything, as `--json` writes it."""
    figures = realtime(40)
    for batch in (1, 16):
        figures |= speculation(batch, repeats, extraction_prompts, "extraction", 0.0)
        figures |= speculation(batch, repeats, plain_prompts, "plain", 1.0)
    ratios = {name: value for name, value in figures.items() if name.endswith("_speed_up")}
    ratios["realtime_ttft_p99_over_batch_step"] = (
        figures["realtime_ttft_ms_p99"] / figures["batch_step_ms_p50"]
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    machine += f" on {torch.get_num_threads()} threads, Python {platform.python_version()}"
    return {
        "name": "engine_speculation",
        "machine": machine,
        "ratios": ratios,
        "figures": figures,
    }


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    answer = measure(options.repeats)
    print(answer["machine"])
    for name, value in {**answer["ratios"], **answer["figures"]}.items():
        print(f"{name:42} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=2) + "\n")


if __name__ == "__main__":
    main()
