"""Reading Zooforge's checkpoints: any rectangle of any tensor, whatever layout wrote it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.checksums import Verifier
from engine.checkpoint.index import STATE, Entry, Part, Shape, key_of, load_index, read_json
from engine.checkpoint.tensor_file import DTYPES, TensorFiles
from engine.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedSource:
    """A checkpoint as a `TensorSource`. Only what overlaps a request is read, and its bits are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = load_index(folder)
        self._files = TensorFiles(folder)
        self._verifier = Verifier(folder, self.index.block_bytes)

    def tensors(self) -> Iterator[tuple[str, str, Shape]]:
        """Kind, published name and shape of all that is stored."""
        for kind, entries in self.index.tensors.items():
            for name, entry in entries.items():
                yield kind, name, entry.shape

    def state(self) -> dict[str, Any]:
        return read_json(self.folder / STATE)

    def dtype_of(self, kind: str, name: str) -> str:
        return self._entry(kind, name).dtype

    def _entry(self, kind: str, name: str) -> Entry:
        try:
            return self.index.tensors[kind][name]
        except KeyError:
            raise UserError(f"{self.folder}: holds no {kind} '{name}'") from None

    def file_of(self, kind: str, name: str) -> Path:
        """Where a tensor lies, or its first part."""
        return self.folder / self._entry(kind, name).parts[0].file

    def read(self, kind: str, name: str, shape: Shape, offset: Shape, extent: Shape) -> Tensor:
        """published[offset : offset + extent] in the stored dtype. UserError if it is not here in this shape.

        Moments of a tensor that was held and did not learn are 0: they are there for the others alone.
        """
        if kind in MOMENTS and kind in self.index.tensors and name not in self.index.tensors[kind]:
            self._entry("param", name)
            return torch.zeros(extent)
        entry = self._entry(kind, name)
        if entry.shape != tuple(shape):
            raise UserError(f"{self.folder}: {kind} '{name}' has shape {entry.shape}, the model needs {tuple(shape)}")
        result = torch.empty(extent, dtype=DTYPES[entry.dtype])
        covered = 0
        for part in entry.parts:
            low = tuple(max(a, b) for a, b in zip(offset, part.offset, strict=True))
            high = tuple(min(a + d, b + e) for a, d, b, e in zip(offset, extent, part.offset, part.extent, strict=True))
            size = tuple(h - lo for lo, h in zip(low, high, strict=True))
            if all(s > 0 for s in size):
                covered += math.prod(size)
                _place(result, low, offset, self._part(kind, name, part, low, size, result.dtype))
        if covered != result.numel():
            raise UserError(f"{self.folder}: {kind} '{name}' is stored in part only; {offset} + {extent} is not in it")
        return result

    def _part(self, kind: str, name: str, part: Part, low: Shape, size: Shape, dtype: torch.dtype) -> Tensor:
        key = key_of(kind, name, part.offset)
        if self._files.shape(part.file, key) != part.extent:
            raise UserError(f"{self.folder / part.file}: '{key}' is not of the shape that index.json gives")
        inside = tuple(a - b for a, b in zip(low, part.offset, strict=True))
        if size != part.extent:
            self._verifier.rectangle(part, key, inside, size)
        tensor = self._files.rectangle(part.file, key, inside, size)
        if tensor.dtype != dtype:
            raise UserError(f"{self.folder / part.file}: '{key}' is not of the dtype that index.json gives")
        if size == part.extent:
            self._verifier.whole(part, key, tensor)
        return tensor


def _place(result: Tensor, low: Sequence[int], offset: Sequence[int], tensor: Tensor) -> None:
    """Copy a stored rectangle that begins at `low` of the whole into a result that begins at `offset`."""
    where = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, offset, tensor.shape, strict=True))
    result[where] = tensor
