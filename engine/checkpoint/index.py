"""`index.json` of a sharded checkpoint: which part of which tensor lies in which file. Free of torch.

It is read as untrusted input: every name, number and file is checked before anything is opened.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import UserError

INDEX = "index.json"
STATE = "state.json"
FORMAT_VERSION = 2  # 1 had no checksums
MAX_BYTES = 1 << 60
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
SMALL_NAME = re.compile(r"(tokenizer/)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
CHECKSUM = "crc32"  # of the rest of index.json

DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """published[offset : offset + extent] is the tensor `key` of `file`."""

    offset: Shape
    extent: Shape
    file: str
    checksums: tuple[int, ...] = ()  # CRC-32 of each block of its bytes; none if an older program wrote it


@dataclass
class Entry:
    """One tensor of the published layout and its parts, which do not overlap."""

    shape: Shape
    dtype: str  # safetensors' name: F32, BF16 ...
    parts: list[Part] = field(default_factory=list)


@dataclass
class Index:
    """What a checkpoint folder holds. `stored` and `aliases` say what an export to Hugging Face writes."""

    family: str
    tensors: dict[str, dict[str, Entry]] = field(default_factory=dict)  # by kind, then by published name
    files: dict[str, int] = field(default_factory=dict)  # sizes in bytes
    small: dict[str, int] = field(default_factory=dict)  # files besides the tensors, and the CRC-32 of each
    block_bytes: int = 4 << 20  # what one of a part's checksums covers
    stored: dict[str, str] = field(default_factory=dict)  # published names of an export and their dtypes
    aliases: dict[str, str] = field(default_factory=dict)  # names that repeat another tensor
    buffers: frozenset[str] = frozenset()  # names that an export leaves in their dtype
    transposed: frozenset[str] = frozenset()  # names that an export writes a matrix's transpose under

    def shapes(self, kind: str = "param") -> dict[str, Shape]:
        return {name: entry.shape for name, entry in self.tensors.get(kind, {}).items()}

    def add(self, kind: str, name: str, shape: Shape, dtype: str, part: Part) -> None:
        """Add a part. ValueError if ranks disagree about the tensor."""
        entry = self.tensors.setdefault(kind, {}).setdefault(name, Entry(shape, dtype))
        if (entry.shape, entry.dtype) != (shape, dtype):
            raise ValueError(
                f"{kind} '{name}': one rank wrote {entry.dtype} {entry.shape}, another one {dtype} {shape}"
            )
        entry.parts.append(part)

    def incomplete(self) -> list[str]:
        """Tensors whose parts do not add up to the whole; there are none unless a backend is wrong."""
        return [
            f"{kind} '{name}'"
            for kind, entries in self.tensors.items()
            for name, entry in entries.items()
            if sum(math.prod(p.extent) for p in entry.parts) != math.prod(entry.shape)
        ]

    def to_json(self) -> str:
        tensors = {
            kind: {
                name: {
                    "shape": e.shape,
                    "dtype": e.dtype,
                    "parts": [[p.offset, p.extent, p.file, p.checksums] for p in e.parts],
                }
                for name, e in entries.items()
            }
            for kind, entries in self.tensors.items()
        }
        head = {"schema_version": FORMAT_VERSION, "family": self.family, "block_bytes": self.block_bytes}
        names = {"stored": self.stored, "aliases": self.aliases, "buffers": sorted(self.buffers)}
        if self.transposed:
            names["transposed"] = sorted(self.transposed)
        body = names | {"files": self.files, "small": self.small}
        text = json.dumps(head | body | {"tensors": tensors})
        return json.dumps({CHECKSUM: zlib.crc32(text.encode())} | json.loads(text))


def key_of(kind: str, name: str, offset: Shape) -> str:
    """A part's name inside its safetensors file."""
    return f"{kind}|{name}|{','.join(map(str, offset))}"


def load_index(folder: Path) -> Index:
    """The checked index of a checkpoint folder. UserError if it or one of its files is missing, damaged or odd."""
    data = read_json(folder / INDEX)
    path = folder / INDEX
    try:
        version = data["schema_version"]
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise UserError(f"{path}: format version {version}, this program reads 1 to {FORMAT_VERSION}")
        index = Index(_text(data["family"]))
        index.stored = {_text(n): _dtype(d) for n, d in data["stored"].items()}
        index.aliases = {_text(n): _text(t) for n, t in data["aliases"].items()}
        index.buffers = frozenset(_text(n) for n in data.get("buffers", []))
        index.transposed = frozenset(_text(n) for n in data.get("transposed", []))
        index.files = {_file(f): _count(size) for f, size in data["files"].items()}
        index.small = {_small(f): _count(crc) for f, crc in data.get("small", {}).items()}
        index.block_bytes = max(1, _count(data.get("block_bytes", index.block_bytes)))
        for kind, entries in data["tensors"].items():
            index.tensors[kind] = {name: _entry(raw, index) for name, raw in entries.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path}: not a checkpoint index of Zooforge ({error!r})") from None
    written = data.pop(CHECKSUM, None)
    if written is not None and written != zlib.crc32(json.dumps(data).encode()):
        raise UserError(f"damaged checkpoint: {path}: its checksum does not fit; it was changed since it was written")
    check_files(folder, index)
    return index


def check_files(folder: Path, index: Index) -> None:
    """UserError, listing every file that is missing or is not what was written: the tensors' files by their size."""
    problems = []
    for file, size in index.files.items():
        path = folder / file
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif path.stat().st_size != size:
            problems.append(f"{path}: {path.stat().st_size} bytes, {size} were written; it is truncated or replaced")
    for file, checksum in index.small.items():
        try:
            if zlib.crc32((folder / file).read_bytes()) != checksum:
                problems.append(f"{folder / file}: its checksum does not fit; it was changed since it was written")
        except OSError as error:
            problems.append(f"{folder / file}: {'missing' if isinstance(error, FileNotFoundError) else error.strerror}")
    if problems:
        raise UserError("damaged checkpoint: " + "\n  ".join(problems))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. UserError if there is none."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {path.parent} is not a complete checkpoint") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a JSON object")
    return data


def _entry(raw: Any, index: Index) -> Entry:
    shape = _shape(raw["shape"])
    entry = Entry(shape, _dtype(raw["dtype"]))
    for offset, extent, file, *checksums in raw["parts"]:
        part = Part(_shape(offset), _shape(extent), _file(file), tuple(map(_count, *checksums)) if checksums else ())
        if file not in index.files or len(part.offset) != len(shape) or len(part.extent) != len(shape):
            raise ValueError(f"part {part} of a tensor of shape {shape}")
        if any(o + e > n for o, e, n in zip(part.offset, part.extent, shape, strict=True)):
            raise ValueError(f"part {part} reaches beyond a tensor of shape {shape}")
        entry.parts.append(part)
    if overlap := overlapping(entry.parts):
        raise ValueError(f"parts {overlap[0]} and {overlap[1]} overlap")
    return entry


def overlapping(parts: list[Part]) -> tuple[Part, Part] | None:
    """Two parts that share an element, if any do. Parts are compared in order of their first row, which is quick."""
    ordered = sorted((p for p in parts if math.prod(p.extent)), key=lambda p: p.offset)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if a.offset and b.offset[0] >= a.offset[0] + a.extent[0]:
                break
            if all(x < y + e and y < x + d for x, d, y, e in zip(a.offset, a.extent, b.offset, b.extent, strict=True)):
                return a, b
    return None


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} should be text")
    return value


def _dtype(value: Any) -> str:
    if value not in DTYPES:
        raise ValueError(f"{value!r} is no dtype of safetensors")
    return value


def _file(value: Any) -> str:
    if not FILE_NAME.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is not the name of a file in this folder")
    return value


def _small(value: Any) -> str:
    if not SMALL_NAME.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is not the name of a file in this folder")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_BYTES:
        raise ValueError(f"{value!r} should be a size")
    return value


def _shape(value: Any) -> Shape:
    shape = tuple(_count(v) for v in value)
    if math.prod(shape) >= MAX_BYTES:
        raise ValueError(f"a tensor of shape {shape}")
    return shape
