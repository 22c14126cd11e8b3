"""What the real scheduler gives to prompts in a step, measured: the table of the coarse device.

For each number of decoding requests the product's ``Scheduler`` runs a few steps at their cost,
until its pace (``gpuagent.engine.pacing``) knows what a token costs; then a long prompt comes, and
the tokens it gets in its first steps are counted. Example, a 70 B model on an A100, target 200 ms::

    decoding   0     512 tokens   nobody waits for a token
               1     ~190         what the target leaves beside a step of 30 ms
               16    ~190, and more when a decoding step alone takes longer

Between measured numbers the next smaller one's room counts.
"""

from functools import lru_cache

from controlplane.simulation.exact import TARGET_ITL_S, EngineSpec, scheduler_of, seconds_of
from gpuagent.engine.request import GenerationRequest, SamplingParams
from gpuagent.engine.scheduler import Scheduler

CONTEXT = 512  # tokens of each decoding request while it is measured
NUM_WARM, NUM_MEASURED = 24, 4


@lru_cache(maxsize=4096)
def rooms(spec: EngineSpec) -> tuple[int, ...]:
    """Prompt tokens of a step beside 0, 1, 2, … ``max_batch`` decoding requests."""
    full = max(spec.max_batch, scheduler_of(spec).config.max_batch_tokens)
    if spec.cost.seconds(full, CONTEXT * spec.max_batch) <= TARGET_ITL_S:
        return (full,)  # no step ever passes the target, so the pace never bounds one
    found = [full]
    for number in range(1, spec.max_batch + 1):
        is_measured = number & (number - 1) == 0  # powers of two
        found.append(_measure(spec, number) if is_measured else found[-1])
    return tuple(found)


def _measure(spec: EngineSpec, num_decoding: int) -> int:
    scheduler = scheduler_of(spec)
    fit = max(1, min(num_decoding, spec.kv_tokens // (2 * CONTEXT) - 1, spec.max_batch - 1))
    for number in range(fit):
        _add(scheduler, f"d{number}", CONTEXT)
    while any(one.num_to_compute > 1 for one in scheduler.running.values()) or scheduler.waiting:
        _step(scheduler, spec)
    for _ in range(NUM_WARM):
        _step(scheduler, spec)
    _add(scheduler, "prompt", min(NUM_MEASURED * 512, spec.max_model_len - 2))
    taken = [_step(scheduler, spec) for _ in range(NUM_MEASURED)]
    return max(1, round(sum(taken) / max(1, sum(one > 0 for one in taken))))


def _add(scheduler: Scheduler, name: str, num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=1 << 16)
    scheduler.add(GenerationRequest(name, (1,) * num_tokens, sampling))


def _step(scheduler: Scheduler, spec: EngineSpec) -> int:
    """Prompt tokens of one step."""
    output = scheduler.schedule()
    scheduler.complete(output, {work.request_id: (1,) for work in output.work if work.samples})
    scheduler.observe(output, seconds_of(spec.cost, output))
    return output.num_extra
