"""The coarse device against the real scheduler, on the same arrivals, and what it is made of."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from controlplane.simulation.calibration import rooms
from controlplane.simulation.coarse import CoarseDevice
from controlplane.simulation.exact import EngineSpec, ExactDevice, seconds_of
from controlplane.simulation.hardware import GPU_CLASSES, Efficiency, step_cost
from controlplane.simulation.jobs import Job
from controlplane.simulation.machines import Device
from controlplane.simulation.scenario import SIZES, Arrivals
from gpuagent.engine.batch import SchedulerOutput, Work
from tests.simulation.fleets import CLASSES, ran, small


def engine(size: str = "8b", gpu: str = "h100-80gb", policy: str = "continuous") -> EngineSpec:
    shape = SIZES[size].shape
    cost = step_cost(GPU_CLASSES[gpu], shape, Efficiency())
    return EngineSpec(cost, shape.num_kv_tokens(SIZES[size].gpu_memory), 32, 16_384, policy)


def jobs_of(number: int, rate: float, seed: int, num_models: int = 1) -> list[Job]:
    chance = np.random.default_rng(seed)
    at = np.cumsum(chance.exponential(1 / rate, number))
    prompts = np.clip(chance.lognormal(6.9, 0.8, number), 1, 8000).astype(int)
    outputs = np.clip(chance.lognormal(5.0, 0.7, number), 1, 1000).astype(int)
    models = chance.integers(num_models, size=number)
    columns = zip(at.tolist(), models.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [Job(n, t, m, "standard", 0, p, o) for n, (t, m, p, o) in enumerate(columns)]


def drive(device: Device, jobs: list[Job], specs: list[EngineSpec]) -> list[Job]:
    """All of them to their ends; in the order of these."""
    for number, spec in enumerate(specs):
        device.attach(str(number), spec)
    coming, ended = list(reversed(jobs)), []
    while coming or device.due < math.inf:
        if coming and coming[-1].at <= device.due:
            job = coming.pop()
            device.submit(str(job.model), job, job.at)
        else:
            now = device.due
            for job in device.run(now):
                job.ended_at = now
                ended.append(job)
    return ended


def means(jobs: list[Job]) -> tuple[float, float]:
    """TTFT and ITL."""
    ttft = np.mean([job.first_at - job.at for job in jobs])
    itl = np.mean([(j.ended_at - j.first_at) / (j.output - 1) for j in jobs if j.output > 1])
    return float(ttft), float(itl)


def coarse() -> Device:
    return CoarseDevice(rooms)


CASES = [
    ("8b", "h100-80gb", "continuous", 2.0, 1),
    ("8b", "h100-80gb", "continuous", 8.0, 1),
    ("8b", "a100-80gb", "static", 1.0, 1),
    ("14b", "a100-80gb", "continuous", 1.0, 1),
    ("1b", "l40s-48gb", "prefill-first", 4.0, 1),
    ("70b", "a100-80gb", "continuous", 0.3, 1),
    ("8b", "h100-80gb", "continuous", 3.0, 3),
    ("8b", "h100-80gb", "static", 2.0, 2),
]


@pytest.mark.parametrize(("size", "gpu", "policy", "rate", "num_models"), CASES)
def test_coarse_agrees_with_the_real_scheduler(
    size: str, gpu: str, policy: str, rate: float, num_models: int
) -> None:
    """Tokens equal, mean TTFT within 15 % and 5 ms, mean ITL within 10 %, busy time within 5 %."""
    specs = [engine(size, gpu, policy)] * num_models
    real, jumps = ExactDevice(), coarse()
    one = drive(real, jobs_of(150, rate, 3, num_models), specs)
    other = drive(jumps, jobs_of(150, rate, 3, num_models), specs)
    assert len(one) == len(other) == 150
    assert real.tally.num_prompt == jumps.tally.num_prompt
    assert real.tally.num_output == jumps.tally.num_output
    (ttft, itl), (coarse_ttft, coarse_itl) = means(one), means(other)
    assert coarse_ttft == pytest.approx(ttft, rel=0.15, abs=0.005)
    assert coarse_itl == pytest.approx(itl, rel=0.10)
    assert jumps.tally.busy_s == pytest.approx(real.tally.busy_s, rel=0.05)


def test_a_fleet_with_a_loss_agrees_too() -> None:
    """Ends equal but for a few, availability within half a percent, TTFT's median within 15 %."""
    changes = {"seconds": 300.0, "arrivals": Arrivals(1.0, classes=CLASSES)}
    one, other = (ran(small(mode=mode, **changes)).outcome for mode in ("exact", "coarse"))
    assert one.num_arrived == other.num_arrived
    assert other.availability == pytest.approx(one.availability, abs=0.005)
    assert other.ttft_s(0.5) == pytest.approx(one.ttft_s(0.5), rel=0.15)
    assert other.utilisation == pytest.approx(one.utilisation, rel=0.05)


@pytest.mark.parametrize("make", [ExactDevice, coarse])
def test_the_module_docstrings_example(make: Callable[[], Device]) -> None:
    """Alone, a job takes its prompt's step and one step for each further token."""
    spec, job = engine(), Job(0, 1.0, 0, "standard", 0, 512, 3)
    drive(make(), [job], [spec])
    first = spec.cost.seconds(512, 512)
    assert job.first_at - 1.0 == pytest.approx(first)
    rest = spec.cost.seconds(1, 513) + spec.cost.seconds(1, 514)
    assert job.ended_at - job.first_at == pytest.approx(rest, rel=1e-6)


@pytest.mark.parametrize("make", [ExactDevice, coarse])
def test_what_leaves_a_device_takes_its_tokens_along(make: Callable[[], Device]) -> None:
    """Detached in the middle, and finished on another device: every token once."""
    device, other, spec = make(), make(), engine()
    job = Job(0, 0.0, 0, "standard", 0, 100, 50)
    device.attach("r", spec)
    device.submit("r", job, 0.0)
    now = 0.0
    while device.due < 0.25:
        now = device.due
        device.run(now)
    assert device.detach("r", 0.25) == [job] and 0 < job.num_done < 50
    had, first = job.num_done, job.first_at
    job.num_tries += 1
    other.attach("s", spec)
    other.submit("s", job, 1.0)
    while other.due < math.inf:
        other.run(other.due)
    assert job.num_done == 50 and job.first_at == first
    assert other.tally.num_output == 50 - had


def test_no_batch_outgrows_its_slots_or_its_memory() -> None:
    spec = engine("8b")
    device = CoarseDevice(rooms)
    device.attach("r", spec)
    jobs = jobs_of(300, 40.0, 1)
    for job in jobs:
        while device.due <= job.at:
            device.run(device.due)
            assert device.num_open("r")[0] <= spec.max_batch
            assert device.kv_used("r") <= 1.0
        device.submit("r", job, job.at)
    assert device.num_open("r")[1] > 0, "it was never full"


def test_the_pace_leaves_a_slow_model_less_room_for_prompts() -> None:
    """Measured on the real scheduler: a 70 B model on an A100 needs short chunks."""
    fast, slow = rooms(engine("1b")), rooms(engine("70b", "a100-80gb"))
    assert set(fast) == {512}
    assert slow[0] == 512 and max(slow[1:]) < 512


def test_a_steps_cost_counts_new_tokens_and_the_context_they_read() -> None:
    spec = engine()
    work = (Work("a", 0, (1,) * 512, (), True), Work("b", 99, (1,), (), True))
    assert seconds_of(spec.cost, SchedulerOutput(1, work)) == spec.cost.seconds(513, 612)
