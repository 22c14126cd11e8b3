"""The engine on the real SmolLM2 gives transformers' greedy tokens, whatever goes on around.

float32; the prompts are plain and none was left out. Different batch shapes sum in another
order, so a near-tie between two tokens could in principle fall either way; over these prompts,
and 40 of the benchmark's trace, none did.
"""

import random
from itertools import takewhile

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from gpuagent.engine.engine import TorchEngine
from gpuagent.engine.request import GenerationRequest, LatencyClass, SamplingParams
from gpuagent.engine.shared_pool import Lease, SharedPool
from tests.engine.real_model import real_model

pytestmark = pytest.mark.timeout(400)  # minutes, if the machine is shared

NUM_TOKENS = 10
END = 2  # <|im_end|>
SYSTEM = "You are a careful assistant who answers briefly and says so if you do not know."
QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "List three prime numbers.",
    "Write a haiku about rain.",
    "Explain photosynthesis to a child.",
    "What does HTTP stand for?",
    "Who wrote Hamlet?",
    "How do I boil an egg?",
    "Translate 'good morning' into Spanish.",
    "What is 12 times 8?",
    "Give me a recipe for pancakes.",
    "Describe the moon in two sentences.",
    "What is a hash table?",
    "Name the planets of the solar system.",
    "Write a Python function that reverses a string.",
    "What causes earthquakes?",
    "Suggest a name for a cat.",
    "How long is a marathon?",
    "What is the difference between a frog and a toad?",
    "Summarise the story of Cinderella.",
    "Say hello in three languages: 你好, γειά, привет.",
    "Why do leaves fall in autumn?",
]


@pytest.fixture(scope="module")
def prompts():
    """Chat prompts; every other one begins with the same system text."""
    tokenizer = Tokenizer.from_file(str(real_model().path / "tokenizer.json"))
    texts = [
        f"<|im_start|>system\n{SYSTEM if i % 2 else 'Be brief.'}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for i, question in enumerate(QUESTIONS)
    ]
    return [tuple(tokenizer.encode(text).ids) for text in texts]


@pytest.fixture(scope="module")
def expected(prompts):
    """transformers' greedy tokens up to the end token, from one left-padded batch."""
    reference = AutoModelForCausalLM.from_pretrained(real_model().path, dtype=torch.float32)
    longest = max(map(len, prompts))
    padding = [[END] * (longest - len(prompt)) for prompt in prompts]
    tokens = torch.tensor([[*pad, *prompt] for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * len(pad) + [1] * (longest - len(pad)) for pad in padding])
    answers = reference.generate(
        tokens, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False
    )
    return [list(takewhile(lambda t: t != END, row)) for row in answers[:, longest:].tolist()]


def ask(i, prompt, latency_class=LatencyClass.STANDARD):
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return GenerationRequest(str(i), prompt, sampling, latency_class)


def generate(engine, requests, joins_at_once=1.0):
    """Tokens by prompt; before each step requests join at random until a coin says stop."""
    coin, waiting = random.Random(7), list(requests)
    tokens = [[] for _ in requests]
    while waiting or engine.has_work():
        while waiting and (coin.random() < joins_at_once or not engine.has_work()):
            engine.add(waiting.pop(0))
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
    return tokens


def test_alone(prompts, expected):
    engine = TorchEngine.load(real_model().path, num_blocks=64, prefix_caching=False)
    for i, prompt in enumerate(prompts):
        (tokens,) = generate(engine, [ask(0, prompt)])
        assert tokens == expected[i], QUESTIONS[i]


def test_batched_with_others_joining_and_leaving_and_prefix_hits(prompts, expected):
    engine = TorchEngine.load(real_model().path, num_blocks=200, max_batch_tokens=100)
    requests = [ask(i, prompt) for i, prompt in enumerate(prompts)]
    assert generate(engine, requests, joins_at_once=0.5) == expected
    num_cached = engine.stats().num_cached_tokens
    assert num_cached > 0
    assert generate(engine, requests, joins_at_once=0.5) == expected
    assert engine.stats().num_cached_tokens - num_cached > 0.7 * sum(map(len, prompts))


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "swap_bytes"), [(30, 4, 0), (30, 4, 64 << 20), (8, 16, 64 << 20)]
)
def test_preempted_again_and_again(prompts, expected, num_blocks, block_size, swap_bytes):
    """Computed anew or swapped, with torch (blocks of 4) and with the native kernels."""
    classes = list(reversed(LatencyClass))  # batch work first, for realtime to push out
    engine = TorchEngine.load(
        real_model().path,
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=50,
        max_num_seqs=3,
        swap_bytes=swap_bytes,
    )
    requests = [ask(i, prompt, classes[i % 3]) for i, prompt in enumerate(prompts)]
    assert generate(engine, requests, joins_at_once=0.3) == expected
    assert engine.stats().num_preemptions > 1
    assert (engine.stats().num_swapped_out > 0) == (swap_bytes > 0)


def test_guessing_ahead(prompts, expected):
    """Lookup guesses, right and wrong, in batches that change, leave every token as it is."""
    engine = TorchEngine.load(real_model().path, num_blocks=200, speculation="ngram")
    requests = [ask(i, prompt) for i, prompt in enumerate(prompts)]
    assert generate(engine, requests, joins_at_once=0.3) == expected
    assert engine.stats().spec_decode_num_draft_tokens > 0


def test_leaving_the_device_before_every_step(prompts, expected):
    """With whatever is unfinished then, out of a pool whose other member takes all it may have."""
    options = {"kv_bytes": 8 << 20, "kv_limit_bytes": 64 << 20, "max_model_len": 128}
    engine, pool = TorchEngine.load(real_model().path, **options), SharedPool()
    other = Lease("other", 16 << 20, 1 << 20)
    other.shed = other.trim = lambda num: other.give(min(num, other.taken_bytes >> 20)) or num
    pool.join(other)
    pool.join(engine.lease)
    step = engine.step

    def leave_and_step():
        engine.park()
        while other.num_promised:
            other.take()
        engine.unpark()
        return step()

    engine.step = leave_and_step
    requests = [ask(i, prompt) for i, prompt in enumerate(prompts)]
    assert generate(engine, requests, joins_at_once=0.5) == expected
