"""OpenVINO GenAI as a child of `engine.py`: reads a trace per line, answers a run per line.

    DIR/ov/bin/python peer_openvino.py MODEL_FOLDER fp32|int8

Settings as its own documentation has them for throughput: dynamic split-fuse, prefix caching,
512 tokens a step. In fp32 nothing is quantised, neither the cache nor the activations.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

FP32 = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}


def pipeline(folder: str, precision: str) -> Any:
    """The pipeline on two threads."""
    config = genai.SchedulerConfig()
    config.cache_size, config.max_num_seqs, config.max_num_batched_tokens = 2, 32, 512
    config.dynamic_split_fuse = config.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": 2, **(FP32 if precision == "fp32" else {})}
    return genai.ContinuousBatchingPipeline(folder, config, "CPU", properties)


def start(pipe: Any, number: int, prompt: list[int], max_tokens: int) -> Any:
    """Queue a greedy request of a forced length."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    return pipe.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)


def closed_loop(pipe: Any, trace: list[Any], concurrency: int, number: int) -> dict[str, Any]:
    """All requests of the trace, a new one as soon as one ends."""
    waiting, live = list(trace), {}
    num_tokens, ttft, begin = 0, [], time.perf_counter()
    while waiting or live:
        while waiting and len(live) < concurrency:
            prompt, length = waiting.pop(0)
            live[number] = [start(pipe, number, prompt, length), length, 0, time.perf_counter()]
            number += 1
        pipe.step()
        for key, (handle, length, count, begun) in list(live.items()):
            if handle.can_read():
                new = sum(len(part.generated_ids) for part in handle.read().values())
                ttft += [time.perf_counter() - begun] if new and not count else []
                num_tokens += new
                live[key][2] = count + new
            if live[key][2] >= length:
                del live[key]
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "num_tokens": num_tokens, "busy_seconds": seconds, "ttft": ttft}


def main() -> None:
    """Answer until the input ends."""
    pipe, number = pipeline(sys.argv[1], sys.argv[2]), 0
    for line in sys.stdin:
        question = json.loads(line)
        answer = closed_loop(pipe, question["trace"], question["concurrency"], number)
        number += len(question["trace"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
