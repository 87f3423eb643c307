"""What safetensors files hold, read from their headers alone: JSON, no tensor, no torch.

Format: https://github.com/huggingface/safetensors (8 bytes little-endian header size, JSON header, tensor bytes).
Files and indices are read as untrusted input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the format's own limit
BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    dtype: str  # safetensors' name: F32, BF16 ...
    shape: Shape
    file: Path
    begin: int = 0  # where its bytes begin in the file


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name. UserError if it is missing, truncated or no safetensors file."""
    return _read(path)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says besides its tensors. UserError as `read_header` has it."""
    return _read(path)[1]


def _read(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > MAX_HEADER:
                raise ValueError("it does not begin with a safetensors header")
            if 8 + length > size:
                raise ValueError(f"{size} bytes, but its header alone takes {8 + length}; it is truncated")
            header = json.loads(file.read(length))
        metadata = {str(key): str(value) for key, value in header.get("__metadata__", {}).items()}
        return _entries(path, header, 8 + length, size - 8 - length), metadata
    except FileNotFoundError:
        raise UserError(f"{path}: missing") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a whole safetensors file: {error}") from None


def _entries(path: Path, header: Any, data_begin: int, data_bytes: int) -> dict[str, TensorInfo]:
    """Checked entries. ValueError and the like for what the format does not allow."""
    tensors: dict[str, TensorInfo] = {}
    last = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = tuple(_count(n) for n in entry["shape"])
        begin, end = (_count(n) for n in entry["data_offsets"])
        bits = BITS.get(entry["dtype"])
        if bits and (end - begin) * 8 != math.prod(shape) * bits:
            raise ValueError(f"'{name}' says {entry['dtype']} {list(shape)} and has {end - begin} bytes")
        last = max(last, end)
        tensors[name] = TensorInfo(str(entry["dtype"]), shape, path, data_begin + begin)
    if last > data_bytes:
        raise ValueError(f"its tensors need {last} bytes and {data_bytes} are there; it is truncated")
    return tensors


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} should be a size")
    return value


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a Hugging Face directory: one file, or those that its index names.

    Raises UserError, one line for each file that is missing, damaged, or lacks a tensor that the index promises.
    """
    if (folder / INDEX).is_file():
        promised = _read_index(folder / INDEX)
    elif (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    else:
        raise UserError(f"{folder}: holds no weights; {_what_there_is(folder)}")
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for file in sorted(set(promised.values())):
        try:
            tensors |= read_header(folder / file)
        except UserError as error:
            problems.append(str(error))
            continue
        absent = sorted(name for name, place in promised.items() if place == file and name not in tensors)
        problems += [f"{folder / file}: '{name}' should be in it, says {INDEX}" for name in absent]
    if problems:
        raise UserError("\n".join(problems))
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    """Tensor names and the files that hold them; every file is inside the folder."""
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(places, dict) or not places:
            raise ValueError("its weight_map names no tensor")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not an index of safetensors files ({error})") from None
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{path}: '{name}' points to {file!r}, which is not a safetensors file of this folder")
    return places


def _what_there_is(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickled:
        return f"{pickled[0]} is pickled, which is not safe to read; convert it to safetensors"
    return f"{SINGLE}, or {INDEX} and the files it names, should be there"


def mismatches(
    found: Mapping[str, Shape],
    wanted: Mapping[str, Shape],
    aliases: Mapping[str, str],
    stand_ins: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Every tensor that is missing or has another shape, layers of one kind in one line. Empty if all is well."""
    shapes = {target: found[alias] for alias, target in aliases.items() if alias in found}
    missing, misshapen = [], []
    for name, shape in wanted.items():
        there = found.get(name, shapes.get(name))
        if there is None and (other := stand_ins.get(name)) is not None:
            there = found.get(other, shapes.get(other))
        if there is None:
            missing.append(name)
        elif there != shape:
            misshapen.append((name, f"has shape {list(there)}, the config makes it {list(shape)}"))
    for alias, target in aliases.items():
        if target in found and alias in found and found[alias] != wanted[target]:
            misshapen.append((alias, f"has shape {list(found[alias])}, the config makes it {list(wanted[target])}"))
    lines = [f"missing: {name}" for name in by_layer(missing)]
    for why in dict.fromkeys(why for _, why in misshapen):
        lines += [f"misshapen: {name} {why}" for name in by_layer([n for n, w in misshapen if w == why])]
    return lines


def unused(found: Mapping[str, Shape], wanted: Mapping[str, Shape], aliases: Mapping[str, str]) -> list[str]:
    """Tensors that are there and that the model has no place for, layers of one kind in one line."""
    return by_layer([name for name in found if name not in wanted and name not in aliases])


def by_layer(names: list[str]) -> list[str]:
    """`model.layers.{0-3,7}.mlp.up_proj.weight` for names that differ in a layer's or an expert's number only."""
    return _folded(_folded(names, 0), -1)


def _folded(names: list[str], which: int) -> list[str]:
    """Names that differ only in one of their numbers, the first or the last, in one line."""
    grouped: dict[tuple[str, str], list[int]] = {}
    order: dict[tuple[str, str], str] = {}
    for name in names:
        parts = name.split(".")
        numbered = [i for i, part in enumerate(parts) if part.isdigit()]
        at = numbered[which] if numbered else None
        key = (name, "") if at is None else (".".join(parts[:at]), ".".join(parts[at + 1 :]))
        order.setdefault(key, name)
        grouped.setdefault(key, []).extend([] if at is None else [int(parts[at])])
    lines = []
    for (head, tail), numbers in grouped.items():
        few = len(numbers) < 2
        lines.append(order[head, tail] if few else f"{head}.{{{_ranges(sorted(numbers))}}}.{tail}")
    return lines


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
