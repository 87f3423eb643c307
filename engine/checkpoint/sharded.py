"""Zooforge's checkpoint format: every rank writes its slices of the published tensors, any layout reads them back.

A checkpoint is a folder:

    step_00000010/
      rank_00000_0.safetensors ...   slices, under the key kind|name|offset
      index.json                     where every slice lies, see `engine.checkpoint.index`
      state.json                     step, data state, validation loss: whatever the caller passed
      config.json, tokenizer/ ...    what an export to Hugging Face needs besides the tensors

It is written as `step_00000010.tmp` and renamed when all ranks are done, so a folder under its final name is complete.
While one of the same step is replaced, the older one is `step_00000010.replaced`, which stands for it until the new one
is there (`engine.checkpoint.swap`).
"""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.backends.base import Slice
from engine.checkpoint.agree import Ranks, agree, attempt
from engine.checkpoint.card import Card, sync_folder, write_synced
from engine.checkpoint.index import INDEX, SMALL_NAME, STATE, Index, Part
from engine.checkpoint.paths import complete, is_checkpoint
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.share import MAX_FILE_BYTES, Share, write_share
from engine.checkpoint.swap import ASIDE, UNFINISHED, discard, put, unfinished
from engine.checkpoint.tensor_file import BLOCK_BYTES
from engine.errors import UserError
from engine.metrics.text import memory

__all__ = ["ShardedSource", "save_sharded"]

FULL = (errno.ENOSPC, errno.EDQUOT)


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
    temporary = unfinished(folder)
    agree(comm, attempt(lambda: prepare(folder, temporary, needed_bytes)) if comm.rank == 0 else None)
    share = write_share(temporary, comm.rank, slices, max_file_bytes, finite)
    _settle(comm, temporary, share)
    listings = comm.all_gather([share.parts, share.files])
    error = None
    if comm.rank == 0:
        error = attempt(lambda: finish(folder, temporary, listings, state, card or Card()))
        if error is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    agree(comm, error)
    return folder


def prepare(folder: Path, temporary: Path, needed_bytes: int | None) -> None:
    """Make room and an empty folder for a checkpoint that will be called `folder`. By one rank."""
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
    """Delete what killed saves left behind, but not a checkpoint that stands aside for one that never came."""
    for leftover in parent.glob(f"step_*{UNFINISHED}"):
        shutil.rmtree(leftover)
    for aside in parent.glob(f"step_*{ASIDE}"):
        if is_checkpoint(aside.with_suffix("")):
            discard(aside)


def _settle(comm: Ranks, temporary: Path, share: Share) -> None:
    """Go on only if every rank has written its share; otherwise clean up and raise everywhere. Collective."""
    if error := failure(comm, temporary, share):
        if comm.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        comm.barrier()
        raise error


def failure(comm: Ranks, temporary: Path, share: Share) -> UserError | None:
    """What to raise, the same on every rank, if one of them could not write its share. Collective."""
    number, text = (getattr(share.error, "errno", None) or -1, str(share.error)) if share.error else (0, "")
    reports = comm.all_gather([number, text, share.needed])
    failures = [(rank, *report) for rank, report in enumerate(reports) if report[0]]
    if not failures:
        return None
    rank, number, text, _ = failures[0]
    if any(f[1] == errno.EFBIG for f in failures):
        return UserError(
            f"the checkpoint {temporary.with_suffix('')} needs files larger than this process may write; raise the "
            f"limit that ulimit -f shows ({_earlier(temporary)})"
        )
    if any(f[1] in FULL for f in failures):
        free = shutil.disk_usage(temporary.parent).free
        return UserError(_full(temporary, sum(r[2] for r in reports), free))
    return UserError(f"rank {rank} cannot write {temporary.with_suffix('')}: {text}; {_earlier(temporary)}")


def _full(temporary: Path, needed: int, free: int) -> str:
    return (
        f"no room for the checkpoint {temporary.with_suffix('')}: it needs {memory(needed)} and {memory(free)} are "
        f"free; make room or set output_dir to another disk ({_earlier(temporary)})"
    )


def _earlier(temporary: Path) -> str:
    """What there is to go on from."""
    last = next(reversed(complete(temporary.parent).values()), None)
    return f"the last checkpoint is {last}" if last else "there is no earlier checkpoint"


def finish(folder: Path, temporary: Path, listings: list[Any], state: dict[str, Any], card: Card) -> None:
    """Complete a checkpoint that all ranks have written their shares of, and give it its name. By one rank.

    `listings` holds [parts, files] of each rank's `Share`.
    """
    names = {"stored": card.stored, "aliases": card.aliases, "buffers": card.buffers, "transposed": card.transposed}
    index = Index(card.family, **names, block_bytes=BLOCK_BYTES)
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
    put(temporary, folder)
