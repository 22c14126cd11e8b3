"""Does the engine give transformers' greedy tokens, whatever goes on around a request?

    python -m tests.benchmarks.engine_equality [--num-prompts 50] [--num-tokens 16] [--json FILE]

The real SmolLM2 in float32. Prompts are pieces of Python's own manual, 16 to 768 tokens, every
third one with one of two beginnings of 160 tokens. transformers generates each alone; this engine
generates all of them under each of `SETTINGS`, in random order, arriving at random steps in random
classes: in full batches, in small chunks in a pool too small for all (so that requests are
preempted, swapped and recomputed), and with tokens guessed ahead. Other sums in another order may
turn a tie between two tokens: where the first token that differs has a score within `TIE` of
transformers' best one, the answer counts as a tie and not as equal.
"""

import argparse
import json
import math
import platform
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from tests.engine.real_model import real_model

SHORTEST, LONGEST, SHARED = 16, 768, 160
TIE = 1e-4
Prompt = tuple[int, ...]
SETTINGS: dict[str, dict[str, Any]] = {
    "full batches": {"max_num_seqs": 16, "num_blocks": 1200},
    "small chunks, small pool": {"max_num_seqs": 12, "num_blocks": 110, "max_batch_tokens": 48},
    "guessed ahead": {"max_num_seqs": 6, "num_blocks": 500, "speculation": "ngram"},
}


@dataclass
class Reference:
    """transformers' answer to a prompt, and the scores (tokens, vocab) it was chosen by."""

    token_ids: list[int]
    scores: torch.Tensor


@dataclass
class Count:
    """What came of one setting."""

    num_equal: int = 0
    num_ties: int = 0
    num_different: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_accepted_guesses: int = 0


def make_prompts(num: int) -> list[Prompt]:
    """Pieces of the manual, their lengths log-uniform, the shortest and the longest included."""
    rng = random.Random(11)
    tokenizer = Tokenizer.from_file(str(real_model().path / "tokenizer.json"))
    text = tokenizer.encode("\n".join(topics[name] for name in sorted(topics))).ids
    lengths = [SHORTEST, LONGEST]
    ratio = math.log(LONGEST / SHORTEST)
    lengths += [round(SHORTEST * math.exp(ratio * rng.random())) for _ in range(num)]
    prompts = []
    for i, length in enumerate(lengths[:num]):
        at = rng.randrange(len(text) - length)
        shared = text[:SHARED] if i % 2 else text[SHARED : 2 * SHARED]
        is_shared = i % 3 == 0 and length > SHARED + SHORTEST
        prefix = shared if is_shared else []
        prompts.append(tuple([*prefix, *text[at : at + length]][:length]))
    return prompts


def references(prompts: list[Prompt], num_tokens: int) -> list[Reference]:
    """Each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(real_model().path, dtype=torch.float32).eval()
    return [_generate(model, prompt, num_tokens) for prompt in prompts]


@torch.inference_mode()
def _generate(model: Any, prompt: Prompt, num_tokens: int) -> Reference:
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = found.sequences[0, len(prompt) :].tolist()
    return Reference(tokens, torch.cat(found.logits))


def answers(engine: TorchEngine, prompts: list[Prompt], num: int, seed: int) -> list[list[int]]:
    """This engine's tokens, the requests coming in at random."""
    rng, found = random.Random(seed), {str(i): [] for i in range(len(prompts))}
    arrivals = _arrivals(rng, prompts, num)
    is_over = False
    while not is_over or engine.has_work():
        for _ in range(rng.choice((0, 0, 1, 2, 6))):
            if request := next(arrivals, None):
                engine.add(request)
            else:
                is_over = True
        for output in engine.step():
            assert output.error_code is None, output
            found[output.request_id] += output.token_ids
    return list(found.values())


def _arrivals(rng: random.Random, prompts: list[Prompt], num: int) -> Iterator[GenerationRequest]:
    sampling = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    for i in rng.sample(range(len(prompts)), len(prompts)):
        latency_class = rng.choices(list(LatencyClass), (1, 2, 4))[0]
        yield GenerationRequest(str(i), prompts[i], sampling, latency_class)


def compare(found: list[list[int]], expected: list[Reference]) -> Count:
    """How many answers are transformers', and how many differ by a tie alone."""
    count = Count()
    for ours, theirs in zip(found, expected, strict=True):
        first = next((i for i, t in enumerate(theirs.token_ids) if ours[i] != t), None)
        if first is None:
            count.num_equal += len(ours) == len(theirs.token_ids)
            continue
        scores = theirs.scores[first]
        is_tie = float(scores.max() - scores[ours[first]]) < TIE
        count.num_ties += is_tie
        count.num_different += not is_tie
    return count


def check(prompts: list[Prompt], num_tokens: int, names: list[str]) -> dict[str, Count]:
    """All prompts under each of the named settings."""
    expected, counts = references(prompts, num_tokens), {}
    for seed, name in enumerate(names):
        engine = TorchEngine.load(real_model().path, **SETTINGS[name])
        counts[name] = compare(answers(engine, prompts, num_tokens, seed), expected)
        stats = engine.stats()
        counts[name].num_preemptions = stats.num_preemptions
        counts[name].num_cached_tokens = stats.num_cached_tokens
        counts[name].num_accepted_guesses = stats.spec_decode_num_accepted_tokens
    return counts


def main() -> None:
    """Compare, print, and write if asked; ends with 1 if a token differs that is no tie."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--num-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = check(make_prompts(options.num_prompts), options.num_tokens, list(SETTINGS))
    for name, count in counts.items():
        print(f"{name}: {count.num_equal} of {options.num_prompts} equal, {count}")
    if options.json:
        num = options.num_prompts * len(counts)
        ratios = {"equal_answers": sum(c.num_equal for c in counts.values()) / num}
        figures = {f"{n}: {k}": v for n, c in counts.items() for k, v in vars(c).items()}
        machine = f"{platform.machine()}, torch {torch.__version__}"
        answer = {"name": "engine_equality", "machine": machine}
        options.json.write_text(json.dumps(answer | {"ratios": ratios, "figures": figures}) + "\n")
    raise SystemExit(any(count.num_different for count in counts.values()))


if __name__ == "__main__":
    main()
