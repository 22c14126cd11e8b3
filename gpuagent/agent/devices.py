"""Which accelerators this node offers: NVML's GPUs, or shares of the CPU's memory.

``cpu:4GiB,cpu:4GiB`` makes two devices of one machine, each with its own worker and a budget of
4 GiB, so that placement on several devices can be tried without a GPU. ``auto`` takes the GPUs,
and where there are none the CPU as one device with all memory. Agents that divide one machine have
each a share of it; of a machine with 3 GPUs and 24 GiB::

    2 agents   1/2: GPUs 0 and 2     2/2: GPU 1         without GPUs: 12 GiB each
    1 agent    1/1: all of it
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml

from gpuagent.wire.messages import Device

UNITS = {"": 1, "B": 1, "MIB": 1 << 20, "GIB": 1 << 30, "MB": 10**6, "GB": 10**9}
CPU_DEVICE = re.compile(r"cpu(?::(\d+(?:\.\d+)?)([A-Za-z]*))?")


SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """``8GiB``, ``500MB`` or a plain number of bytes; raises ValueError for anything else."""
    match = SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"not a size: {text!r}; write e.g. 8GiB, 500MB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2].upper()])


class DeviceError(ValueError):
    """The device list cannot be read, or names what is not there."""


class Share(NamedTuple):
    """The ``number``-th (from 1) of ``of`` agents that divide a machine."""

    number: int = 1
    of: int = 1


def parse_share(text: str) -> Share:
    """``1/2``; raises ValueError for what is no such part."""
    match = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"not a share: {text!r}; write e.g. 1/2 for the first of two")
    return Share(int(match[1]), int(match[2]))


WHOLE = Share()


def find_devices(text: str, share: Share = WHOLE) -> tuple[Device, ...]:
    """The devices that ``text`` (see the module) stands for; raises DeviceError. Those that are
    named are this agent's, whatever its share."""
    if text == "cuda":
        return _gpus() or _no_gpu()
    if text == "auto":
        size = f"cpu:{psutil.virtual_memory().total // share.of}" if share.of > 1 else "cpu"
        return _gpus()[share.number - 1 :: share.of] or (_cpu(0, size),)
    return tuple(_cpu(index, part.strip()) for index, part in enumerate(text.split(",")))


def _no_gpu() -> tuple[Device, ...]:
    raise DeviceError("no GPU was found")


def _cpu(index: int, text: str) -> Device:
    match = CPU_DEVICE.fullmatch(text)
    if match is None or (match[2] or "").upper() not in UNITS:
        raise DeviceError(f"not a device: {text!r}; write cpu, cpu:4GiB, cuda or auto")
    total = psutil.virtual_memory().total
    size = int(float(match[1]) * UNITS[match[2].upper()]) if match[1] else total
    if not 0 < size <= total:
        raise DeviceError(f"{text!r}: this machine has {total} bytes")
    return Device(index=index, kind="cpu", name=_cpu_name(), memory_bytes=size)


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def _gpus() -> tuple[Device, ...]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    number = range(pynvml.nvmlDeviceGetCount())
    links = _links([pynvml.nvmlDeviceGetHandleByIndex(index) for index in number])
    return tuple(_gpu(index, links[index]) for index in number)


def _links(handles: list[Any]) -> list[str]:
    """The NVLink domain of each GPU, named after its first; empty where it is linked to none."""
    links = [""] * len(handles)
    for first, one in enumerate(handles):
        linked = [i for i, other in enumerate(handles) if i != first and _is_linked(one, other)]
        for index in (first, *linked) if linked else ():
            links[index] = links[index] or f"nvlink{first}"
    return links


def _is_linked(one: Any, other: Any) -> bool:
    with suppress(pynvml.NVMLError):
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == pynvml.NVML_P2P_STATUS_OK)
    return False


def _gpu(index: int, link: str) -> Device:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return Device(
        index=index,
        kind="cuda",
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        link=link,
    )
