"""transformers' continuous batching as a child of `engine.py`, in the Python of `DIR/hf`.

    DIR/hf/bin/python peer_transformers.py MODEL_FOLDER fp32

Lines in and out as in `peer_openvino.py`. Its manager steps in a thread of its own; blocks of 32
tokens and 512 tokens a step, which were the fastest of its settings.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

CACHE = {"page_size": 32, "num_blocks": 1024, "use_cuda_graph": False}
LIMITS = {"max_batch_tokens": 512, "max_requests_per_batch": 32}


def load(folder: str) -> Any:
    """The running manager."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    greedy = GenerationConfig(do_sample=False, max_new_tokens=256, eos_token_id=-1, pad_token_id=2)
    manager = model.init_continuous_batching(
        generation_config=greedy,
        continuous_batching_config=ContinuousBatchingConfig(**CACHE, **LIMITS),
    )
    manager.start()
    return manager


def closed_loop(manager: Any, trace: list[Any], concurrency: int) -> dict[str, Any]:
    """All requests of the trace, a new one as soon as one ends."""
    waiting, begun, ttft = list(trace), {}, {}
    num_tokens, begin = 0, time.perf_counter()
    while waiting or begun:
        while waiting and len(begun) < concurrency:
            prompt, num = waiting.pop(0)
            name = manager.add_request(list(prompt), max_new_tokens=num, streaming=True)
            begun[name] = time.perf_counter()
        output = manager.get_result(timeout=0.002)
        if output is None:
            continue
        name = output.request_id
        if output.generated_tokens:
            ttft.setdefault(name, time.perf_counter() - begun[name])
        if output.is_finished():
            num_tokens += len(output.generated_tokens)
            del begun[name]
    seconds = time.perf_counter() - begin
    times = list(ttft.values())
    return {"seconds": seconds, "num_tokens": num_tokens, "busy_seconds": seconds, "ttft": times}


def main() -> None:
    """Answer until the input ends; whatever the library prints goes to the error output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    manager = load(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        answer = closed_loop(manager, question["trace"], question["concurrency"])
        print(json.dumps(answer), file=answers, flush=True)
    manager.stop(block=True)


if __name__ == "__main__":
    main()
