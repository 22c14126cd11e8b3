"""Write a model folder as an AWQ checkpoint: the published layout, half-byte by half-byte.

Rounding is to the nearest of sixteen steps between a group's least and greatest weight. AWQ's
search for scales that spare the important channels is not done, so the quality of what this
writes is the least that the format gives; the format itself is exact. Nothing here shares code
with the reader.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INTERLEAVED = [0, 2, 4, 6, 1, 3, 5, 7]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rounded(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """Codes (out, in) 0..15, zeros (out, groups) 0..15 and float16 scales (out, groups)."""
    outputs, inputs = weight.shape
    grouped = weight.float().view(outputs, inputs // group, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (grouped / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return codes.clamp(0, 15).view(outputs, inputs).int(), zeros.int(), scales


def widened(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the three mean, element by element: (code - zero) * scale."""
    group = codes.shape[1] // zeros.shape[1]
    offsets = zeros.repeat_interleave(group, 1)
    return (codes - offsets).float() * scales.float().repeat_interleave(group, 1)


def packed(values: torch.Tensor) -> torch.Tensor:
    """(rows, out) values 0..15 as (rows, out / 8) words, eight interleaved outputs each."""
    rows, outputs = values.shape
    words = torch.zeros(rows, outputs // 8, dtype=torch.int64)
    for column in range(outputs // 8):
        for place, output in enumerate(INTERLEAVED):
            words[:, column] |= values[:, column * 8 + output].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def export(source: Path, target: Path, group: int) -> Path:
    """Write `target` as AWQ, and beside it `target`-widened with the same weights in float32."""
    wide = target.with_name(target.name + "-widened")
    for folder in (target, wide):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, torch.Tensor] = {}
    plain = load_file(source / "model.safetensors")
    for name, tensor in list(plain.items()):
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and stem.endswith(PROJECTIONS):
            codes, zeros, scales = rounded(tensor, group)
            stored[f"{stem}.qweight"] = packed(codes.T)
            stored[f"{stem}.qzeros"] = packed(zeros.T)
            stored[f"{stem}.scales"] = scales.T.contiguous()
            plain[name] = widened(codes, zeros, scales)
        else:
            stored[name] = tensor
    save_file(stored, target / "model.safetensors")
    save_file(plain, wide / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    (target / "config.json").write_text(json.dumps(config))
    return target
