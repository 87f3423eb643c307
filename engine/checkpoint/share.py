"""One rank's part of a checkpoint: safetensors files with its slices of the published tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import Slice
from engine.checkpoint.index import key_of
from engine.checkpoint.tensor_file import DTYPE_NAMES, TensorFile, nbytes
from engine.errors import UserError

MAX_FILE_BYTES = 4 << 30


@dataclass
class Share:
    """What one rank wrote."""

    parts: list[list[Any]] = field(default_factory=list)  # [kind, name, shape, dtype, offset, extent, file, checksums]
    files: dict[str, int] = field(default_factory=dict)
    needed: int = 0  # bytes of the rank's slices, those that found no room included
    error: OSError | UserError | None = None


class ShareWriter:
    """Writes one rank's slices into safetensors files of at most about `max_bytes`, one open file for each dtype.

    Elements of one size share a file, so that all of them are aligned.
    """

    def __init__(self, folder: Path, rank: int, max_bytes: int) -> None:
        self.share = Share()
        self._folder, self._rank, self._max_bytes = folder, rank, max_bytes
        self._open: dict[torch.dtype, TensorFile] = {}

    def add(self, part: Slice) -> None:
        key, tensor = key_of(part.kind, part.name, part.offset), part.tensor
        file = self._file_for(key, tensor)
        checksums = file.add(key, tensor)
        dtype, where = DTYPE_NAMES[tensor.dtype], [list(part.offset), list(tensor.shape), file.path.name, checksums]
        self.share.parts.append([part.kind, part.name, list(part.shape), dtype, *where])

    def _file_for(self, key: str, tensor: Tensor) -> TensorFile:
        file = self._open.get(tensor.dtype)
        if file and file.data_bytes and file.data_bytes + nbytes(tensor) > self._max_bytes:
            file = self._finish(tensor.dtype)
        if file and not file.has_room(key, tensor):
            file = self._finish(tensor.dtype)
        if file is None:
            count = len(self.share.files) + len(self._open)
            file = TensorFile(self._folder / f"rank_{self._rank:05d}_{count}.safetensors")
            self._open[tensor.dtype] = file
        return file

    def _finish(self, dtype: torch.dtype) -> None:
        file = self._open.pop(dtype)
        self.share.files[file.path.name] = file.close()

    def close(self) -> None:
        for dtype in list(self._open):
            self._finish(dtype)

    def abandon(self) -> None:
        for file in self._open.values():
            file.abandon()
        self._open.clear()


def write_share(folder: Path, rank: int, slices: Iterable[Slice], max_file_bytes: int, finite: bool) -> Share:
    """Write every slice. After an error the rest is still drawn, because making a slice may be collective."""
    writer = ShareWriter(folder, rank, max_file_bytes)
    share = writer.share
    for part in slices:
        share.needed += nbytes(part.tensor)
        if share.error is None:
            try:
                if finite:
                    check_finite(part)
                writer.add(part)
            except (OSError, UserError) as error:
                share.error = error
    try:
        if share.error is None:
            writer.close()
    except OSError as error:
        share.error = error
    writer.abandon()
    return share


def check_finite(part: Slice) -> None:
    """UserError for a tensor with NaN or infinity. A sum is finite only if all of it is, and is the cheaper test."""
    tensor = part.tensor
    if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float64)):
        return
    if not torch.isfinite(tensor).all():
        raise UserError(f"{part.kind} '{part.name}' holds values that are not finite, and such weights are not saved")
