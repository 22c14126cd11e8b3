"""Live figures of this node: from the workers' counters, /proc and, where there are GPUs, NVML.

Utilisation is the busy fraction of the step loop, not NVML's: a GPU that waits for its host still
counts as busy there. Rates are differences of counters between two reports; where nothing ran in
between, the last known rate stands, for a router needs an estimate before the first request.
"""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil
import pynvml

from gpuagent.agent.ipc import ReplicaStats
from gpuagent.agent.metrics import Served
from gpuagent.agent.replicas import Replica
from gpuagent.wire.messages import Device, DeviceLoad, ReplicaLoad

# Of so few prompt tokens in an interval the rate says what a step costs at least, a tenth of what a
# prompt of hundreds is computed at: a router that believed it would send those elsewhere.
MEASURABLE_TOKENS = 64
WORK_BYTES = 16 << 20


@dataclass(frozen=True)
class _Rates:
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    step_s: float = 0.0


class LoadMeter:
    """Keeps each replica's newest counters and what they were at the last report."""

    def __init__(self) -> None:
        self._now: dict[str, ReplicaStats] = {}
        self._before: dict[str, ReplicaStats] = {}
        self._rates: dict[str, _Rates] = {}
        self._stepped_at: dict[str, float] = {}
        self._reported_at = time.monotonic()

    def update(self, stats: Iterable[ReplicaStats]) -> None:
        """Take a worker's counters."""
        for entry in stats:
            old = self._now.get(entry.replica_id)
            if old is None or entry.num_steps != old.num_steps:
                self._stepped_at[entry.replica_id] = time.monotonic()
            self._now[entry.replica_id] = entry

    def forget(self, replica_id: str) -> None:
        """The replica is gone, or its engine starts again from zero."""
        for table in (self._now, self._before, self._rates, self._stepped_at):
            table.pop(replica_id, None)

    def report(self) -> dict[str, float]:
        """End an interval: its busy fraction of each replica, 0..1."""
        now = time.monotonic()
        interval = max(now - self._reported_at, 1e-3)
        busy: dict[str, float] = {}
        for replica_id, entry in self._now.items():
            before = self._before.get(replica_id, ReplicaStats(replica_id))
            seconds = entry.busy_seconds - before.busy_seconds
            busy[replica_id] = min(max(seconds / interval, 0.0), 1.0)
            old = self._rates.get(replica_id, _Rates())
            self._rates[replica_id] = _rates(before, entry, old)
        self._before = dict(self._now)
        self._reported_at = now
        return busy

    def load_of(
        self,
        replica: Replica,
        served: Served,
        num_active: int,
        num_held: int = 0,
        expected_wait_s: float = 0.0,
        load_work: float = 0.0,
    ) -> ReplicaLoad:
        """One replica's figures as of its newest counters."""
        replica_id = replica.spec.replica_id
        stats = self._now.get(replica_id, ReplicaStats(replica_id))
        rates = self._rates.get(replica_id, _Rates())
        stepped_at = self._stepped_at.get(replica_id, 0.0)
        age = time.monotonic() - stepped_at if num_active and stepped_at else 0.0
        return ReplicaLoad(
            replica_id=replica_id,
            version_id=replica.spec.version_id,
            device_index=replica.spec.device_index,
            state=replica.state,
            num_running=min(stats.num_running, num_active),
            num_waiting=max(num_active - stats.num_running, 0),
            num_free_blocks=stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            block_size=stats.block_size,
            prefill_tokens_per_s=round(rates.prefill_tokens_per_s, 1),
            decode_step_s=round(rates.decode_step_s, 6),
            generated_tokens=served.generated_tokens,
            prompt_tokens=served.prompt_tokens,
            cached_tokens=served.cached_tokens,
            num_preemptions=stats.num_preemptions,
            last_step_age_s=round(age, 3),
            step_s=round(rates.step_s, 6),
            num_steps=stats.num_steps,
            num_swapped_out=stats.num_swapped_out,
            num_recomputed=stats.num_recomputed,
            swapped_bytes=stats.swapped_bytes,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            waiting_by_class=stats.waiting_by_class if num_active else {},
            busy_seconds=round(stats.busy_seconds, 3),
            tier=replica.tier,
            tier_since=replica.tier_since,
            num_held=num_held,
            expected_wait_s=round(expected_wait_s, 3),
            charged_bytes=replica.measured_bytes,
            prefix_filter=stats.prefix_filter,
            load_work=round(load_work, 2),
        )

    def kv_held_bytes(self, replica_id: str) -> int:
        """Bytes of the KV pool that the replica's unfinished requests hold."""
        return self._now.get(replica_id, ReplicaStats(replica_id)).kv_held_bytes


def _rates(before: ReplicaStats, now: ReplicaStats, old: _Rates) -> _Rates:
    prefill_seconds = now.prefill_seconds - before.prefill_seconds
    decode_steps = now.decode_steps - before.decode_steps
    num_steps = now.num_steps - before.num_steps
    rates = old
    if num_steps > 0:
        rates = replace(rates, step_s=(now.busy_seconds - before.busy_seconds) / num_steps)
    tokens = now.prefill_tokens - before.prefill_tokens
    if prefill_seconds > 0 and tokens >= MEASURABLE_TOKENS:
        rates = replace(rates, prefill_tokens_per_s=tokens / prefill_seconds)
    if decode_steps > 0:
        seconds = now.decode_seconds - before.decode_seconds
        rates = replace(rates, decode_step_s=seconds / decode_steps)
    return rates


def device_load(
    device: Device,
    pids: Iterable[int],
    utilization: float,
    reserved_bytes: int,
    foreign_bytes: int = 0,
    away_bytes: int = 0,
) -> DeviceLoad:
    """A device's figures. ``reserved_bytes`` is what its replicas may use without asking.

    On the CPU "used" is the larger of the workers' resident memory and that reservation: a KV
    pool that nobody has touched yet is not resident, but it is not free either. ``away_bytes`` of
    the workers' memory are the host tier's.
    """
    if device.kind == "cuda":
        with suppress(pynvml.NVMLError):  # a GPU that fell off the bus: its memory reads as 0
            return _gpu_load(device, set(pids), utilization)
    return DeviceLoad(
        index=device.index,
        utilization=utilization,
        memory_used_bytes=max(sum(map(resident_bytes, pids)) - away_bytes, reserved_bytes),
        memory_total_bytes=device.memory_bytes,
        foreign_bytes=foreign_bytes,
        temperature_c=_cpu_temperature(),
    )


def foreign_bytes(devices: Iterable[Device], pids: Mapping[int, list[int]]) -> dict[int, int]:
    """What of each device's memory other processes than ours (``pids`` by device) hold.

    On a GPU the driver says. A CPU's memory is foreign as far as the machine could not give it any
    more: 4 GiB promised, 1 GiB used by us and 2 GiB available are 1 GiB foreign.
    """
    own = sum(resident_bytes(pid) for each in pids.values() for pid in each)
    reachable = psutil.virtual_memory().available + own
    found = {}
    for device in devices:
        found[device.index] = max(device.memory_bytes - reachable, 0)
        if device.kind == "cuda":
            found[device.index] = 0
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
                found[device.index] = _foreign_on_gpu(handle, set(pids.get(device.index, [])))
    return found


def _foreign_on_gpu(handle: object, own_pids: set[int]) -> int:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return int(sum(p.usedGpuMemory or 0 for p in processes if p.pid not in own_pids))


def work_of(pids: Iterable[int]) -> float:
    """What these processes, and those that they started, have done so far: seconds of processor,
    and units of 16 MiB read from storage or written."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            total += sum(map(_work, [process, *process.children(recursive=True)]))
    return total


def _work(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        moved = process.io_counters()
        return sum(process.cpu_times()[:4]) + (moved.read_bytes + moved.write_bytes) / WORK_BYTES
    return 0.0


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


def _cpu_temperature() -> float:
    sensors: Mapping[str, list] = psutil.sensors_temperatures()
    found = [entry.current for name in ("coretemp", "k10temp") for entry in sensors.get(name, [])]
    return max(found, default=0.0)


def _gpu_load(device: Device, own_pids: set[int], utilization: float) -> DeviceLoad:
    handle = pynvml.nvmlDeviceGetHandleByUUID(device.uuid)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    temperature, power = 0.0, 0.0
    with suppress(pynvml.NVMLError):  # not every board has every sensor
        temperature = float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
        power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return DeviceLoad(
        index=device.index,
        utilization=utilization,
        memory_used_bytes=int(memory.used),
        memory_total_bytes=int(memory.total),
        foreign_bytes=_foreign_on_gpu(handle, own_pids),
        temperature_c=temperature,
        power_w=power,
    )
