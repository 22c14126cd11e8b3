"""Pages of weight files that have been read are given back, and memory of one's own is not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpuagent.models import mapping
from gpuagent.models.loader import load_tensors
from gpuagent.models.mapping import MappedFiles
from tests.absent import skip_without

NUM = 4 << 20  # 16 MB of float32


def resident_kb(suffix: str) -> int:
    """Kilobytes in memory of the mapped files whose names end so."""
    total, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_wanted = line.endswith(suffix)
        elif is_wanted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.fixture
def folder(tmp_path):
    if not mapping.MAPS.exists():
        skip_without("a kernel with /proc/self/maps")
    save_file({"weight": torch.arange(NUM, dtype=torch.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_checked_file_takes_no_memory_until_it_is_read(folder):
    name = f"{folder.name}/model.safetensors"
    tensor = load_tensors(folder)["weight"]
    assert resident_kb(name) < 1024
    assert tensor[-1] == NUM - 1
    assert tensor.sum() > 0
    assert resident_kb(name) > 4 * NUM // 1024 - 64
    MappedFiles().forget([tensor])
    assert resident_kb(name) < 1024
    assert tensor[-1] == NUM - 1, "read again from the page cache"


def test_memory_that_is_no_file_keeps_its_contents(folder):
    mapped = load_tensors(folder)
    own = torch.arange(NUM, dtype=torch.float32)
    MappedFiles().forget([own, *mapped.values()])
    assert torch.equal(own, mapped["weight"])
