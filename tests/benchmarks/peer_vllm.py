"""vLLM's CPU engine as a child of `engine.py`, in the Python of `DIR/vllm`; see `peer_openvino.py`.

DIR/vllm/bin/python peer_vllm.py MODEL_FOLDER fp32
"""

import json
import os
import sys
import time
from typing import Any

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "2",
}


def load(folder: str) -> Any:
    """The engine, with prefix caching and as many requests at once as the others."""
    from vllm import LLM

    limits = {"max_num_seqs": 32, "max_model_len": 2048}
    return LLM(folder, dtype="float32", enable_prefix_caching=True, **limits).llm_engine


def start(engine: Any, number: int, prompt: list[int], max_tokens: int) -> None:
    """Queue a greedy request of a forced length."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add_request(str(number), {"prompt_token_ids": prompt}, params)


def closed_loop(engine: Any, trace: list[Any], concurrency: int, number: int) -> dict[str, Any]:
    """All requests of the trace, a new one as soon as one ends."""
    waiting, begun = list(trace), {}
    num_tokens, ttft, begin = 0, {}, time.perf_counter()
    while waiting or begun:
        while waiting and len(begun) < concurrency:
            start(engine, number, *waiting.pop(0))
            begun[str(number)] = time.perf_counter()
            number += 1
        for output in engine.step():
            name = output.request_id.partition("-")[0]
            if output.outputs[0].token_ids:
                ttft.setdefault(name, time.perf_counter() - begun[name])
            if output.finished:
                num_tokens += len(output.outputs[0].token_ids)
                del begun[name]
    seconds = time.perf_counter() - begin
    times = list(ttft.values())
    return {"seconds": seconds, "num_tokens": num_tokens, "busy_seconds": seconds, "ttft": times}


def main() -> None:
    """Answer until the input ends; whatever the engine prints goes to the error output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= SETTINGS
    engine, number = load(sys.argv[1]), 0
    for line in sys.stdin:
        question = json.loads(line)
        answer = closed_loop(engine, question["trace"], question["concurrency"], number)
        number += len(question["trace"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
