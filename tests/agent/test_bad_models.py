"""Models that cannot be served, on a real agent: a typed reason each, and a neighbour unharmed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gpuagent.wire.messages import ReplicaSpec, Sampling
from tests.agent.conftest import StartAgent
from tests.agent.harness import Control, spec
from tests.engine.tiny_model import wide_tiny_model

MIB = 1 << 20
Damage = Callable[[Path], None]


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def flipped_header(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[:8] = b"\xff" * 8
    (folder / "model.safetensors").write_bytes(content)


def not_a_number(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors")


def outside(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../../etc/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def configured(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **changes}))

    return damage


BAD: dict[str, tuple[str, Damage]] = {
    "truncated": ("weights_malformed", truncated),
    "header": ("weights_malformed", flipped_header),
    "nan": ("weights_rejected", not_a_number),
    "outside": ("manifest_invalid", outside),
    "wide": ("config_invalid", configured(hidden_size=1 << 40)),
    "layers": ("config_invalid", configured(num_hidden_layers=-1)),
    "large": ("insufficient_memory", configured(num_hidden_layers=1024, hidden_size=8192)),
    "code": ("config_rejected", configured(auto_map={"AutoModel": "evil.Model"})),
    "vocabulary": ("config_invalid", configured(vocab_size=260)),
}


def replica(name: str, folder: Path, **fields: object) -> ReplicaSpec:
    values = {"version_id": f"{name}@1", "model": name, "memory_bytes": 64 * MIB, **fields}
    return spec(f"{name}.1.g1.0", source=f"file://{folder}", max_model_len=256, **values)


async def test_each_is_refused_for_its_reason_and_its_neighbour_streams_on(
    plane: Control, start_agent: StartAgent, tmp_path: Path
) -> None:
    """All in the worker of a model that generates meanwhile: same process, no token lost, and each
    bad one is tried again only after ten seconds or more."""
    folders = tmp_path / "models"
    replicas = [replica("good", shutil.copytree(wide_tiny_model(), folders / "good"))]
    for name, (_, damage) in BAD.items():
        damage(shutil.copytree(wide_tiny_model(), folders / name))
        replicas.append(replica(name, folders / name))
    replicas.append(replica("digest", folders / "good", sha256="0" * 64))
    agent = start_agent("n1", "--file-roots", str(folders), "--threads", "1")
    await plane.place("n1", replicas[0])
    await plane.replica("n1", "ready", "good.1.g1.0")
    worker = agent.workers()[0].pid
    sampling = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    streams = [await plane.generate("n1", replica_id="good.1.g1.0", sampling=sampling)]
    await plane.started(streams[0])
    await plane.place("n1", *replicas, generation=2)
    expected = {name: code for name, (code, _) in BAD.items()} | {"digest": "checksum_mismatch"}
    for name, code in expected.items():
        status = await plane.replica("n1", "failed", f"{name}.1.g1.0")
        assert (status.reason_code, bool(status.reason)) == (code, True), name
        assert str(tmp_path) not in status.reason or name == "digest"
    streams.append(await plane.generate("n1", replica_id="good.1.g1.0", sampling=sampling))
    for name in streams:
        assert (await plane.terminal(name)).finish_reason == "length"
    assert plane.assert_contiguous(streams[0]) == plane.assert_contiguous(streams[1])
    assert [process.pid for process in agent.workers()] == [worker]
    assert agent.log.count("replica_start") == 1 + len(expected), "none was tried twice"
