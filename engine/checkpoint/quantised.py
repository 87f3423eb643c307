"""Weights that are published quantised: which stored tensors make up which matrix. Free of torch.

Three formats are read, each block by block:

- FP8 (DeepSeek-V3, MiniMax-M2): `NAME` in e4m3 and `NAME_scale_inv`, a factor for each block of 128 x 128;
- MXFP4 (gpt-oss; OCP Microscaling Formats 1.0): `NAME_blocks` [..., rows, blocks, 16], two numbers a byte, and
  `NAME_scales`, an exponent for each block of 32; what they make is transposed, [..., blocks * 32, rows];
- packed INT4 (compressed-tensors' `pack-quantized`, as Kimi-K2-Thinking): `NAME_packed`, eight numbers in an int32,
  and `NAME_scale`, a factor for each group of columns; `NAME_shape` says the shape once more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.headers import Shape, TensorInfo

FP8_BLOCK = (128, 128)
FP8_DTYPE = "F8_E4M3"  # as safetensors says it
FP8, MXFP4, INT4 = "fp8", "mxfp4", "int4"
CONFIG_KEY = "quantization_config"
NIBBLES = 8  # of an int32


@dataclass(frozen=True)
class Quantised:
    """A matrix in a quantised format."""

    kind: str
    values: str  # stored names
    scales: str
    shape: Shape  # of the matrix
    block: tuple[int, int]  # rows and columns that share a scale
    also: str | None = None  # stored beside it


def dtype_of(one: Quantised) -> str:
    """What the matrix counts as: a format that can be exported again, or what it is without."""
    return FP8_DTYPE if one.kind == FP8 else "BF16"


def unsupported(config: Any) -> str | None:
    """Why weights of a published `quantization_config` cannot be read; None if they can."""
    if not isinstance(config, dict):
        return "not an object"
    method = config.get("quant_method")
    if method == "fp8":
        block = config.get("weight_block_size")
        if block is not None and not _pair(block):
            return f"weight_block_size={block!r} should be two sizes"
        return None if str(config.get("fmt", "e4m3")).endswith(("e4m3", "e4m3fn")) else f"fmt={config['fmt']!r}"
    if method == "mxfp4":
        return None
    if method == "compressed-tensors":
        return _packed_problem(config)
    return f"quant_method={method!r}"


def _pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def _packed_problem(config: dict[str, Any]) -> str | None:
    groups = config.get("config_groups")
    if config.get("format") != "pack-quantized" or not isinstance(groups, dict) or not groups:
        return f"format={config.get('format')!r}"
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            return "a group without weights"
        if weights.get("num_bits") != 4 or weights.get("type", "int") != "int" or not weights.get("symmetric", True):
            return "numbers other than symmetric 4-bit integers"
        if weights.get("actorder"):
            return f"actorder={weights['actorder']!r}"
    return None


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a directory's config.json, if it is one that can be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes()).get(CONFIG_KEY)
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return config if config and unsupported(config) is None else None


SUPPORTED = "FP8 in blocks (e4m3), MXFP4 and packed symmetric INT4 (compressed-tensors) are read"


def find(infos: Mapping[str, TensorInfo], config: Mapping[str, Any] | None = None) -> dict[str, Quantised]:
    """The quantised matrices among stored tensors, by name."""
    block = tuple((config or {}).get("weight_block_size") or FP8_BLOCK)
    found = {}
    for name, info in infos.items():
        if info.dtype == FP8_DTYPE and len(info.shape) == 2 and f"{name}_scale_inv" in infos:
            found[name] = Quantised(FP8, name, f"{name}_scale_inv", info.shape, (block[0], block[1]))
        elif (
            name.endswith("_blocks")
            and info.dtype == "U8"
            and len(info.shape) > 2
            and _beside(name, "_blocks", "_scales") in infos
        ):
            *before, rows, count, half = info.shape
            scales = _beside(name, "_blocks", "_scales")
            shape = (*before, count * 2 * half, rows)
            found[name.removesuffix("_blocks")] = Quantised(MXFP4, name, scales, shape, (2 * half, 1))
        elif name.endswith("_packed") and info.dtype == "I32" and _matrices(infos, name):
            scales = _beside(name, "_packed", "_scale")
            rows, columns, groups = info.shape[0], info.shape[1] * NIBBLES, infos[scales].shape[1]
            also = _beside(name, "_packed", "_shape")
            size = _group_size(config, columns, groups)
            shape = (rows, min(columns, groups * size))
            found[name.removesuffix("_packed")] = Quantised(
                *(INT4, name, scales, shape, (1, size)), also=also if also in infos else None
            )
    return found


def _matrices(infos: Mapping[str, TensorInfo], packed: str) -> bool:
    """Whether packed integers and their scales have two dimensions."""
    scales = infos.get(_beside(packed, "_packed", "_scale"))
    return scales is not None and len(scales.shape) == len(infos[packed].shape) == 2


def _beside(name: str, suffix: str, other: str) -> str:
    return name.removesuffix(suffix) + other


def _group_size(config: Mapping[str, Any] | None, columns: int, groups: int) -> int:
    """Columns that share a scale: as the config says, else as they divide."""
    for group in ((config or {}).get("config_groups") or {}).values():
        size = group["weights"].get("group_size")
        if size and size > 0:
            return int(size)
    return -(-columns // max(1, groups))


def logical(infos: Mapping[str, TensorInfo], found: Mapping[str, Quantised]) -> dict[str, TensorInfo]:
    """The stored tensors, with matrices in the place of what they are made of."""
    parts = {part for one in found.values() for part in (one.values, one.scales, one.also) if part}
    plain = {name: info for name, info in infos.items() if name not in parts}
    made = {
        name: dataclasses.replace(infos[one.values], dtype=dtype_of(one), shape=one.shape)
        for name, one in found.items()
    }
    return plain | made


def wrong_scales(infos: Mapping[str, TensorInfo], found: Mapping[str, Quantised]) -> list[str]:
    """Lines for scales that do not fit their matrix."""
    lines = []
    for name, one in found.items():
        values, scales = infos[one.values].shape, infos[one.scales].shape
        wanted = values[:-1] if one.kind == MXFP4 else grid(one.shape, one.block)
        if tuple(scales) != tuple(wanted):
            lines.append(f"misshapen: {one.scales} has shape {list(scales)}, {name} needs {list(wanted)}")
    return lines


def grid(shape: Shape, block: tuple[int, int]) -> Shape:
    """Blocks of a matrix along both dimensions."""
    return tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
