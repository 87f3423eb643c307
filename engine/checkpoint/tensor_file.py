"""Writing safetensors files one tensor at a time, so that no more than one tensor is ever held in host memory.

The format puts the header first, so room is reserved for it and the rest filled with spaces, which the format allows.
Reading is left to the safetensors package.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import UserError

DTYPES: dict[str, torch.dtype] = {  # by safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_ROOM = 1 << 18
BLOCK_BYTES = 4 << 20  # of a tensor, from its first byte on: each block has a checksum of its own


def host_bytes(tensor: Tensor) -> memoryview:
    """The tensor's elements in row-major order. A copy only if it is on a device or not contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def blocks(data: memoryview, size: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """The bytes in pieces of `size`, the last one as long as what is left."""
    return (data[at : at + size] for at in range(0, len(data), size))


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def header_room(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None) -> int:
    """Bytes that the header of a file with exactly these (key, dtype, shape), in this order, takes: a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for key, dtype, shape in tensors:
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return -(-len(json.dumps(entries)) // 8) * 8


class TensorFile:
    """A safetensors file being written. `room` bytes are kept for the header (a multiple of 8)."""

    def __init__(self, path: Path, room: int = HEADER_ROOM, metadata: dict[str, str] | None = None) -> None:
        self.path = path
        self.data_bytes = 0
        self._room = room
        self._entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self._header_bytes = len(json.dumps(self._entries))
        self._file: BinaryIO = path.open("wb")
        try:
            self._file.seek(8 + room)
        except OSError:
            self._file.close()
            raise

    def has_room(self, key: str, tensor: Tensor) -> bool:
        """Whether the header can take one more tensor of this name."""
        return self._header_bytes + len(json.dumps(key)) + 32 * (tensor.dim() + 4) <= self._room

    def add(self, key: str, tensor: Tensor) -> list[int]:
        """Append a tensor; the checksums of its blocks. OSError if the disk refuses it."""
        end = self.data_bytes + nbytes(tensor)
        entry = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.data_bytes, end],
        }
        checksums = []
        for block in blocks(host_bytes(tensor)):
            self._file.write(block)
            checksums.append(zlib.crc32(block))  # while the block is still in the processor's cache
        self._entries[key] = entry
        self._header_bytes += len(json.dumps({key: entry})) + 2
        self.data_bytes = end
        return checksums

    def close(self) -> int:
        """Write the header, bring everything to the disk and return the file's size."""
        header = json.dumps(self._entries).encode().ljust(self._room)
        if len(header) > self._room:
            raise ValueError(f"the header of {self.path.name} takes {len(header)} bytes, {self._room} were reserved")
        try:
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + header)
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return 8 + self._room + self.data_bytes

    def abandon(self) -> None:
        """Close without completing; errors of a full disk are ignored, the file is about to be deleted."""
        try:
            self._file.close()
        except OSError:
            return


class TensorFiles:
    """Safetensors files of one folder, opened when needed, at most `limit` at a time."""

    def __init__(self, folder: Path, limit: int = 64) -> None:
        self.folder = folder
        self._limit = limit
        self._open: OrderedDict[str, Any] = OrderedDict()

    def get(self, file: str) -> Any:
        """The open file. UserError if it is missing, truncated or not safetensors."""
        handle = self._open.pop(file, None)
        if handle is None:
            try:
                handle = safe_open(str(self.folder / file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.folder / file}: {_reason(error)}") from None
        self._open[file] = handle
        while len(self._open) > self._limit:
            self._open.popitem(last=False)
        return handle

    def names(self, file: str) -> list[str]:
        return list(self.get(file).keys())

    def shape(self, file: str, key: str) -> tuple[int, ...]:
        return tuple(self._slice(file, key).get_shape())

    def dtype(self, file: str, key: str) -> str:
        """safetensors' name: F32, BF16 ..."""
        return str(self._slice(file, key).get_dtype())

    def _slice(self, file: str, key: str) -> Any:
        try:
            return self.get(file).get_slice(key)
        except SafetensorError:
            raise UserError(f"{self.folder / file}: holds no tensor '{key}'") from None

    def rectangle(self, file: str, key: str, offset: tuple[int, ...], extent: tuple[int, ...]) -> Tensor:
        """stored[offset : offset + extent]; only that part is read."""
        handle = self.get(file)
        if extent == self.shape(file, key):
            return handle.get_tensor(key)
        return handle.get_slice(key)[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return f"cannot be read as safetensors, it is truncated or damaged ({error})"
