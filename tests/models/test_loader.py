"""Only sound safetensors load, by mapping; everything else has a code."""

import json
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gpuagent.models.errors import LoadError
from gpuagent.models.loader import load_tensors

CODES = {"weights_malformed", "weights_rejected", "manifest_invalid", "format_not_allowed"}


def write(folder, header, data=b"\0" * 16, name="model.safetensors"):
    """A safetensors file from a header (object or text) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start=0, end=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def refused(folder):
    with pytest.raises(LoadError) as refusal:
        load_tensors(folder)
    return refusal.value.code


def test_sound_tensors_load_as_they_were_saved(tmp_path):
    tensors = {"a.weight": torch.randn(3, 4), "b": torch.randn(2).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_tensors(tmp_path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_tensors_are_mapped_not_copied(tmp_path):
    """A large tensor adds no anonymous memory to the process: its pages are the file's."""
    save_file({"a": torch.ones(4 << 20)}, tmp_path / "model.safetensors")
    tensor = load_tensors(tmp_path)["a"]
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if str(tmp_path) in line]
    spans = [[int(x, 16) for x in line.split()[0].split("-")] for line in mapped]
    assert any(start <= tensor.data_ptr() < end for start, end in spans)


def test_shards_load_by_their_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(load_tensors(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        {},
        {"a": "../one.safetensors"},
        {"a": "/etc/passwd"},
        {"a": "missing.safetensors"},
        {"a": "link.safetensors"},
        {"a": 3},
        {"a": "one.bin"},
        {"b": "one.safetensors"},
        {"a": "one.safetensors", "b": "one.safetensors"},
        {"a": "one.safetensors", "b": "two.safetensors"},
    ],
    ids=str,
)
def test_an_index_that_leaves_the_folder_or_is_wrong_is_refused(tmp_path, weight_map):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "two.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "one.safetensors")
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refused(tmp_path) == "manifest_invalid"


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "pytorch_model.bin", "model.gguf"])
def test_other_formats_are_not_opened(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps({"a": 1}))
    assert refused(tmp_path) == "format_not_allowed"


def test_a_renamed_pickle_or_archive_is_recognised(tmp_path):
    for content in (pickle.dumps({"a": 1}), b"PK\x03\x04 torch.save"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert refused(tmp_path) == "format_not_allowed"


def test_an_empty_folder_has_no_manifest(tmp_path):
    assert refused(tmp_path) == "manifest_invalid"


MALFORMED = {
    "empty file": b"",
    "header length of 2^64": b"\xff" * 8 + b"{}",
    "header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "no json": struct.pack("<Q", 2) + b"xx",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert refused(tmp_path) == "weights_malformed"


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(end=8)},
        {"a": entry(end=32)},
        {"a": entry(start=4, end=20)},
        {"a": entry(), "b": entry()},
        {"a": entry(start=16, end=0)},
        {"a": entry(shape=(2**62, 4))},
        {"a": entry(dtype="PICKLE")},
        {"a": {"dtype": "F32"}},
        {"a": entry(end=4, shape=(1,))},
    ],
    ids=str,
)
def test_offsets_that_overlap_overflow_or_leave_holes_are_refused(tmp_path, header):
    write(tmp_path, header)
    assert refused(tmp_path) == "weights_malformed"


def test_what_the_library_accepts_but_we_do_not(tmp_path):
    twice = json.dumps({"a": entry()})[:-1] + ", " + json.dumps({"a": entry()})[1:]
    headers = [
        twice.encode(),
        {"../../x": entry()},
        {"/etc/x": entry()},
        {"a b": entry()},
        {"a": entry(dtype="I32")},
        {f"t{i}": entry(0, 0, (0,)) for i in range(100_001)} | {"a": entry()},
    ]
    for header in headers:
        write(tmp_path, header)
        assert refused(tmp_path) == "weights_rejected"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_refused(tmp_path, bad, dtype):
    tensor = torch.ones(1000, dtype=dtype)
    tensor[777] = bad
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    assert refused(tmp_path) == "weights_rejected"


def test_finite_weights_whose_sum_overflows_are_fine(tmp_path):
    save_file({"a": torch.full((10,), 3e38)}, tmp_path / "model.safetensors")
    assert len(load_tensors(tmp_path)["a"]) == 10


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_mutated_file_loads_or_is_refused_with_a_code(tmp_path_factory, data):
    """Bytes changed, cut off or added anywhere never end in anything but a LoadError."""
    folder = tmp_path_factory.mktemp("mutant")
    write(folder, {"a": entry(), "b": entry(16, 24, (2,))}, b"\0" * 24)
    content = bytearray((folder / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    content = content[:cut] if data.draw(st.booleans()) else content
    (folder / "model.safetensors").write_bytes(content + data.draw(st.binary(max_size=3)))
    try:
        load_tensors(folder)
    except LoadError as refusal:
        assert refusal.code in CODES
