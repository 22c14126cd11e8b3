"""How long a step and a load take on a class of GPU: a roofline, and bandwidths.

A step computes ``tokens`` new tokens over ``context`` tokens of keys and values, and cannot be
faster than its arithmetic or its traffic (Williams et al., "Roofline", CACM 2009)::

    seconds = overhead + max(2 * params * tokens / (flops * mfu),
                             (weights + kv_bytes * context) / (bandwidth * mbu))

Worked example, 8 billion parameters in bf16 (16 GB), 128 KiB of keys and values a token, on an H100
(989 TFLOP/s at 0.5, 3.35 TB/s at 0.7, overhead 2 ms)::

    decode, 1 request of 1,000 tokens      2 + max(0.03, 6.9)   =  8.9 ms    memory
    decode, 32 requests of 1,000           2 + max(1.0, 8.6)    = 10.6 ms    memory
    prefill, 512 tokens of a prompt        2 + max(16.6, 6.8)   = 18.6 ms    arithmetic

Figures of the classes are the vendors' data sheets (dense bf16, SXM where there is one); the shares
``mfu`` and ``mbu`` of them that inference reaches, the overhead and the loading bandwidths are
assumptions, the same for all, and arguments of a scenario. A model's first load on a node comes
over the network and stays on its disk; each later one comes from there.
"""

import msgspec

TFLOPS, GBPS, GIB = 1e12, 1e9, 1024**3


class GpuClass(msgspec.Struct, frozen=True):
    """``flops`` a second (dense bf16), ``bandwidth`` and ``memory_bytes`` of one device."""

    name: str
    flops: float
    bandwidth: float
    memory_bytes: int


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``mfu`` and ``mbu``: shares of the peak that a step reaches; ``overhead_s`` of each step.
    Bytes a second from the network, from the node's disk; ``start_s``: a load's fixed part."""

    mfu: float = 0.5
    mbu: float = 0.7
    overhead_s: float = 0.002
    network: float = 1.25 * GBPS
    disk: float = 3.0 * GBPS
    start_s: float = 4.0


GPU_CLASSES = {
    one.name: one
    for one in (
        GpuClass("a100-40gb", 312 * TFLOPS, 1555 * GBPS, 40 * GIB),
        GpuClass("a100-80gb", 312 * TFLOPS, 2039 * GBPS, 80 * GIB),
        GpuClass("h100-80gb", 989 * TFLOPS, 3350 * GBPS, 80 * GIB),
        GpuClass("h200-141gb", 989 * TFLOPS, 4800 * GBPS, 141 * GIB),
        GpuClass("l40s-48gb", 362 * TFLOPS, 864 * GBPS, 48 * GIB),
    )
}


class ModelShape(msgspec.Struct, frozen=True):
    """``params``: of the whole model. Bytes of its weights, and of keys and values per token."""

    params: float
    weights_bytes: int
    kv_bytes: int

    def num_kv_tokens(self, gpu_memory: int, workspace: int = GIB) -> int:
        """Tokens of keys and values that fit beside the weights."""
        return max(0, gpu_memory - self.weights_bytes - workspace) // self.kv_bytes


class StepCost(msgspec.Struct, frozen=True):
    """The roofline of one model on one class, folded into four numbers (seconds)."""

    overhead: float
    per_token: float
    weights: float
    per_context: float

    def seconds(self, tokens: float, context: float) -> float:
        """Of a step of ``tokens`` new tokens that reads ``context`` tokens of keys and values."""
        compute, traffic = tokens * self.per_token, self.weights + context * self.per_context
        return self.overhead + (compute if compute > traffic else traffic)


def step_cost(gpu: GpuClass, shape: ModelShape, how: Efficiency) -> StepCost:
    """Seconds of a step by its tokens and context."""
    bandwidth = gpu.bandwidth * how.mbu
    return StepCost(
        how.overhead_s,
        2 * shape.params / (gpu.flops * how.mfu),
        shape.weights_bytes / bandwidth,
        shape.kv_bytes / bandwidth,
    )


def load_seconds(shape: ModelShape, how: Efficiency, is_on_disk: bool) -> float:
    """From being told to being ready; 16 GB are 16.8 s the first time and 9.3 s the next."""
    return how.start_s + shape.weights_bytes / (how.disk if is_on_disk else how.network)
