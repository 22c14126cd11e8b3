"""Moving a request from one engine to another: prefill here, decode there.

A prompt is computed by an engine that does nothing else, so that it stalls nobody's tokens, and the
request goes on in another one. What goes over is what the second cannot know: the tokens delivered,
the seed, and the keys and values, block by block and bit by bit:

    prefill   step 1   all of "chat"'s prompt, first token 42
              detach   HandOver(token_ids=(42,), seed=7, num_computed=100), 7 blocks as bytes
    decode    adopt    the blocks go into host memory, "chat" into the queue
              step 9   a slot is free: swapped in like a preempted request, 42 is computed

So the second engine needs no other mechanism than preemption (`preemption`, `swap`), and what is
computed is what one engine would have computed. If the second has no room the first goes on
decoding, and the request moves later, with more tokens.
"""

import torch
from torch import Tensor

from gpuagent.engine.model_runner import Executor
from gpuagent.engine.preemption import HostCopy
from gpuagent.engine.scheduler import Scheduler
from gpuagent.engine.swap import HostBuffer


def num_bytes_of(scheduler: Scheduler, block_bytes: int, request_id: str) -> int:
    """Bytes of the blocks that a running request has filled, the last one perhaps in part."""
    return len(_blocks(scheduler, request_id)) * block_bytes


def copy_out(
    scheduler: Scheduler, executor: Executor, request_id: str, contents: memoryview
) -> None:
    """Put a running request's keys and values into `contents`."""
    found = executor.read_blocks(_blocks(scheduler, request_id)).cpu().flatten()
    _bytes(contents)[: len(found)] = found


def copy_in(
    scheduler: Scheduler, host: HostBuffer, num_tokens: int, contents: memoryview
) -> HostCopy | None:
    """Keep the keys and values of `num_tokens` tokens in host blocks; None if none are free."""
    num_blocks = scheduler.kv.num_blocks_for(num_tokens)
    copy = scheduler.host.reserve(num_blocks, num_tokens)
    if copy:
        host.fill(copy.blocks, _bytes(contents).view(num_blocks, -1))
    return copy


def _blocks(scheduler: Scheduler, request_id: str) -> tuple[int, ...]:
    sequence = scheduler.running[request_id]
    num_blocks = scheduler.kv.num_blocks_for(sequence.num_computed)
    return scheduler.kv.table(request_id)[:num_blocks]


def _bytes(contents: memoryview) -> Tensor:
    return torch.frombuffer(contents, dtype=torch.uint8)
