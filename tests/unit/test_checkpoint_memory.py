"""A rank that reads its slices never holds the whole of what is on the disk."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.base import Slice
from engine.checkpoint.agree import Alone
from engine.checkpoint.reader import ShardedSource
from engine.checkpoint.sharded import save_sharded
from engine.checkpoint.sources import HFSource

TENSORS, SHAPE = 24, (1024, 1024)  # 4 MiB each, 96 MiB in all
SHARE = 8


def private_bytes() -> int:
    """Memory that is this process's own, without the pages of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def growth(read: Callable[[str], Tensor]) -> int:
    """The most that holding one slice of every tensor adds, looked at after each."""
    ctypes.CDLL(None).malloc_trim(0)  # or memory that was free already would be used, and not be seen
    before, held, most = private_bytes(), [], 0
    for number in range(TENSORS):
        held.append(read(f"w{number}"))
        most = max(most, private_bytes() - before)
    return most


def test_slices_alone_are_read(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(TENSORS)]
    (tmp_path / "hf").mkdir()
    save_file({name: torch.ones(SHAPE) for name in names}, tmp_path / "hf" / "model.safetensors")
    parts = (Slice("param", name, SHAPE, (0, 0), torch.ones(SHAPE)) for name in names)
    folder = save_sharded(tmp_path / "step_00000001", parts, {}, Alone())
    share = TENSORS * (4 << 20) // SHARE
    rows, columns = (SHAPE[0] // SHARE, SHAPE[1]), (SHAPE[0], SHAPE[1] // SHARE)
    for source in (HFSource(tmp_path / "hf"), ShardedSource(folder)):
        for extent in (rows, columns):
            offset = tuple(3 * n if n < 1024 else 0 for n in extent)
            added = growth(lambda name, o=offset, e=extent, s=source: s.read("param", name, SHAPE, o, e).clone())
            assert share * 0.9 < added < share + (16 << 20), (type(source).__name__, extent, added)
