"""torch's keys and values in float32 and int8: what is stored comes back, wherever it is moved."""

import math

import pytest
import torch

from gpuagent.engine.batch import Work
from gpuagent.engine.kv_cache import Copy
from gpuagent.engine.kv_tensors import KVTensors
from gpuagent.models.config import read_config
from tests.engine.tiny_model import wide_tiny_model

CONFIG = read_config(wide_tiny_model())
SIZE = 16


@pytest.fixture(params=[False, True], ids=["float32", "int8"])
def filled(request):
    """A pool of six blocks; blocks 1 and 4 of layer 1 hold random vectors."""
    kv = KVTensors(CONFIG, 6, SIZE, torch.float32, is_int8=request.param)
    slots = torch.tensor([*range(SIZE, 2 * SIZE), *range(4 * SIZE, 5 * SIZE)])
    shape = 2, 2 * SIZE, CONFIG.num_kv_heads, CONFIG.head_dim
    key, value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    kv.store(1, slots, key, value)
    return kv, key, value


def gather(kv, *blocks):
    width = SIZE * CONFIG.num_kv_heads * CONFIG.head_dim
    out = torch.full((2 * len(blocks), width), math.nan)
    return [part.clone() for part in kv.gather(1, torch.tensor(blocks), out)]


def test_what_is_stored_is_read_back(filled):
    """int8 to half a step of the vector's largest element."""
    kv, *stored = filled
    for found, expected in zip(gather(kv, 1, 4), stored, strict=True):
        steps = expected.abs().amax(-1, keepdim=True) / 127 if kv.is_int8 else 0.0
        assert ((found - expected).abs() <= 0.501 * steps).all()
    assert not any(part.any() for part in gather(kv, 0, 5, kv.null_block))


def test_copies_carry_everything(filled):
    kv, *_ = filled
    before = gather(kv, 1, 4)
    kv.copy_blocks([Copy(1, 4), Copy(4, 1)])
    after = gather(kv, 4, 1)
    assert all(map(torch.equal, before, after)), "sources are read before targets are written"


def test_contents_move_to_another_pool_bit_by_bit(filled):
    kv, *_ = filled
    other = KVTensors(CONFIG, 9, SIZE, torch.float32, is_int8=kv.is_int8)
    contents = kv.read_blocks([1, 4])
    other.write_blocks([8, 2], contents)
    assert all(map(torch.equal, gather(kv, 1, 4), gather(other, 8, 2)))
    per_block = SIZE * CONFIG.kv_bytes_per_token("int8" if kv.is_int8 else "float32")
    assert contents.shape == (2, per_block) and contents.dtype == torch.uint8
    assert kv.num_bytes == 7 * per_block


def test_what_is_erased_reads_as_zero(filled):
    kv, *_ = filled
    kv.erase(Work("a", 3, (0,) * 20, (1, 4), samples=True))
    for part in gather(kv, 1, 4):
        assert not part[3:23].any() and part[:3].any() and part[23:].any()


def test_a_vector_that_is_not_finite_stays_so():
    """Its request is found unsound by that; a zero vector is zero."""
    kv = KVTensors(CONFIG, 1, SIZE, torch.float32, is_int8=True)
    vectors = torch.zeros(2, CONFIG.num_kv_heads, CONFIG.head_dim)
    vectors[0, 0, 3] = math.nan
    kv.store(1, torch.tensor([0, 1]), vectors, torch.zeros_like(vectors))
    key, value = gather(kv, 0)
    assert key[0, 0].isnan().any() and not key[1:].any() and not value.any()
