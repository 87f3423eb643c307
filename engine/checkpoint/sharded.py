"""Zooforge's checkpoint format: every rank writes its slices of the published tensors, any layout reads them back.

A checkpoint is a folder:

    step_00000010/
      rank_00000_0.safetensors ...   slices, under the key kind|name|offset
      index.json                     where every slice lies, see `engine.checkpoint.index`
      state.json                     step, data state, validation loss: whatever the caller passed
      config.json, tokenizer/ ...    what an export to Hugging Face needs besides the tensors

It is written as `step_00000010.tmp` and renamed when all ranks are done, so a folder under its final name is complete.
"""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.backends.base import Slice
from engine.checkpoint.agree import Ranks, agree, attempt
from engine.checkpoint.card import Card, sync_folder, write_synced
from engine.checkpoint.index import INDEX, SMALL_NAME, STATE, Index, Part, key_of
from engine.checkpoint.paths import complete
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.tensor_file import BLOCK_BYTES, DTYPE_NAMES, TensorFile, nbytes
from engine.errors import UserError
from engine.metrics.text import memory

__all__ = ["ShardedSource", "save_sharded"]

MAX_FILE_BYTES = 4 << 30
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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


def save_sharded(
    folder: Path,
    slices: Iterable[Slice],
    state: dict[str, Any],
    comm: Ranks,
    card: Card | None = None,
    needed_bytes: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    finite: bool = False,
) -> Path:
    """Write a checkpoint of all ranks' slices under the final name `folder`. Collective.

    `needed_bytes` is an estimate for all ranks; if it does not fit the disk nothing is written. When the disk refuses
    the data, every rank raises the same UserError, the unfinished folder is gone and older checkpoints are untouched;
    so too, with `finite`, where a tensor holds NaN or infinity.
    An older checkpoint of the same name is replaced once the new one is complete.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    agree(comm, attempt(lambda: _prepare(folder, temporary, needed_bytes)) if comm.rank == 0 else None)
    share = _write_share(temporary, comm.rank, slices, max_file_bytes, finite)
    _settle(comm, temporary, share)
    listings = comm.all_gather([share.parts, share.files])
    error = None
    if comm.rank == 0:
        error = attempt(lambda: _complete(folder, temporary, listings, state, card or Card()))
        if error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    agree(comm, error)
    return folder


def _prepare(folder: Path, temporary: Path, needed_bytes: int | None) -> None:
    if folder.exists() and not (folder / INDEX).is_file():
        raise UserError(f"{folder}: is there already and is no checkpoint; choose another folder or remove it")
    parent = temporary.parent
    parent.mkdir(parents=True, exist_ok=True)
    clean(parent)
    shutil.rmtree(temporary, ignore_errors=True)
    free = shutil.disk_usage(parent).free
    if needed_bytes is not None and needed_bytes > free:
        raise UserError(_full(temporary, needed_bytes, free))
    temporary.mkdir()


def clean(parent: Path) -> None:
    """Delete what killed saves left behind."""
    for leftover in parent.glob("step_*.tmp"):
        shutil.rmtree(leftover)


def _write_share(folder: Path, rank: int, slices: Iterable[Slice], max_file_bytes: int, finite: bool) -> Share:
    """Write every slice. After an error the rest is still drawn, because making a slice may be collective."""
    writer = ShareWriter(folder, rank, max_file_bytes)
    share = writer.share
    for part in slices:
        share.needed += nbytes(part.tensor)
        if share.error is None:
            try:
                if finite:
                    _check_finite(part)
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


def _settle(comm: Ranks, temporary: Path, share: Share) -> None:
    """Go on only if every rank has written its share; otherwise clean up and raise everywhere. Collective."""
    number, text = (getattr(share.error, "errno", None) or -1, str(share.error)) if share.error else (0, "")
    reports = comm.all_gather([number, text, share.needed])
    failures = [(rank, *report) for rank, report in enumerate(reports) if report[0]]
    if not failures:
        return
    if comm.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    comm.barrier()
    rank, number, text, _ = failures[0]
    if any(f[1] in FULL for f in failures):
        free = shutil.disk_usage(temporary.parent).free
        raise UserError(_full(temporary, sum(r[2] for r in reports), free))
    raise UserError(f"rank {rank} cannot write {temporary.with_suffix('')}: {text}; {_earlier(temporary)}")


def _check_finite(part: Slice) -> None:
    """UserError for a tensor with NaN or infinity. A sum is finite only if all of it is, and is the cheaper test."""
    tensor = part.tensor
    if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float64)):
        return
    if not torch.isfinite(tensor).all():
        raise UserError(f"{part.kind} '{part.name}' holds values that are not finite, and such weights are not saved")


def _full(temporary: Path, needed: int, free: int) -> str:
    return (
        f"no room for the checkpoint {temporary.with_suffix('')}: it needs {memory(needed)} and {memory(free)} are "
        f"free; make room or set output_dir to another disk ({_earlier(temporary)})"
    )


def _earlier(temporary: Path) -> str:
    """What there is to go on from."""
    last = next(reversed(complete(temporary.parent).values()), None)
    return f"the last checkpoint is {last}" if last else "there is no earlier checkpoint"


def _complete(folder: Path, temporary: Path, listings: list[Any], state: dict[str, Any], card: Card) -> None:
    index = Index(card.family, stored=card.stored, aliases=card.aliases, block_bytes=BLOCK_BYTES)
    for parts, files in listings:
        index.files |= files
        for kind, name, shape, dtype, offset, extent, file, checksums in parts:
            index.add(kind, name, tuple(shape), dtype, Part(tuple(offset), tuple(extent), file, tuple(checksums)))
    if missing := index.incomplete():
        raise ValueError("the ranks' slices do not add up to whole tensors: " + ", ".join(missing[:5]))
    card.write(temporary)
    write_synced(temporary / STATE, json.dumps(state, indent=1))
    small = {path.relative_to(temporary).as_posix(): path for path in temporary.rglob("*") if path.is_file()}
    index.small = {
        name: zlib.crc32(path.read_bytes())
        for name, path in sorted(small.items())
        if name not in index.files and SMALL_NAME.fullmatch(name)
    }
    write_synced(temporary / INDEX, index.to_json())
    sync_folder(temporary)
    replaced = folder.with_name(folder.name + ".old.tmp")
    if folder.exists():
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
