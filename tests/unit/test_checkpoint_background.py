"""Saving in the background: steps may change the tensors at once, all ranks agree, and failures reach every rank."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.base import Slice
from engine.checkpoint import share, tensor_file
from engine.checkpoint.agree import Alone
from engine.checkpoint.background import HostCopies
from engine.checkpoint.card import Card
from engine.checkpoint.manager import CheckpointManager
from engine.checkpoint.reader import ShardedSource
from engine.errors import UserError
from engine.schema import Checkpoint
from tests.unit.thread_ranks import on_ranks

SETTINGS = Checkpoint("test", save_interval=5, export_every=2)


def rows(tensor: Tensor, rank: int, world: int) -> list[Slice]:
    return [
        Slice("param", "w", tuple(tensor.shape), (row, 0), tensor[row : row + 1])
        for row in range(rank, tensor.shape[0], world)
    ]


def stored(folder: Path, shape: tuple[int, ...]) -> Tensor:
    return ShardedSource(folder).read("param", "w", shape, (0,) * len(shape), shape)


@pytest.mark.parametrize("world", [1, 3])
def test_what_was_there_at_the_save_is_saved(tmp_path: Path, world: int) -> None:
    """The tensors change as soon as `save` returns; several saves one after another, more ranks than rows of some."""
    weights = [torch.arange(14.0).reshape(7, 2) for _ in range(world)]

    def work(ranks: Any) -> list[Path]:
        manager, mine = CheckpointManager(tmp_path, SETTINGS, ranks), weights[ranks.rank]
        folders = []
        for step in (1, 2, 3):
            folders.append(manager.save(step, rows(mine, ranks.rank, world), {"step": step}))
            mine.mul_(10)
        manager.wait()
        assert manager.saved == folders[-1] and not manager.failed
        return folders

    folders = on_ranks(world, work)
    assert folders == [folders[0]] * world
    for step, folder in zip((2, 3), folders[0][1:], strict=True):
        assert torch.equal(stored(folder, (7, 2)), torch.arange(14.0).reshape(7, 2) * 10 ** (step - 1))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000002", "step_00000003"]
    assert not list(folders[0][1].glob("*share*"))


def test_copies_use_their_memory_again() -> None:
    copies, tensor = HostCopies(), torch.ones(3, 2)
    first = copies.take(rows(tensor, 0, 1))
    tensor.fill_(2)
    second = copies.take(rows(tensor, 0, 1))
    assert [a.tensor.data_ptr() for a in first] == [b.tensor.data_ptr() for b in second]
    assert all(part.tensor.eq(2).all() for part in second)
    assert len(copies.take(rows(tensor, 0, 3))) == 1 and len(copies._memory) == 1


class Full(tensor_file.TensorFile):
    """A disk that is full for rank 1."""

    def add(self, key: str, tensor: Tensor) -> list[int]:
        if "rank_00001" in self.path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().add(key, tensor)


@pytest.mark.parametrize("failing", ["disk", "nan", "rename"])
def test_a_failure_reaches_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    seen = threading.Barrier(3, timeout=20)

    def work(ranks: Any) -> None:
        manager = CheckpointManager(tmp_path, SETTINGS, ranks)
        good, bad = torch.ones(6, 1), torch.ones(6, 1)
        manager.save(1, rows(good, ranks.rank, 3), {"step": 1})
        manager.wait()
        seen.wait()
        if ranks.rank == 0 and failing == "disk":
            monkeypatch.setattr(share, "TensorFile", Full)
        if failing == "nan":
            bad[1] = torch.nan
        if ranks.rank == 0 and failing == "rename":
            monkeypatch.setattr(Card, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full", "index")))
        seen.wait()
        manager.save(2, rows(bad, ranks.rank, 3), {"step": 2})
        manager.save(3, rows(good, ranks.rank, 3), {"step": 3})

    errors = on_ranks(3, work)
    assert all(isinstance(error, UserError) for error in errors), errors
    words = {"disk": "no room", "nan": "param 'w' holds values that are not finite", "rename": "cannot write index"}
    assert all(words[failing] in str(error) for error in errors)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert stored(tmp_path / "checkpoints" / "step_00000001", (6, 1)).eq(1).all()


def test_a_rank_that_knows_says_so_before_the_others(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, SETTINGS, Alone())
    manager.save(1, rows(torch.full((2, 1), torch.inf), 0, 1), {"step": 1})
    manager._saving._thread.join(20)  # type: ignore[union-attr]
    assert manager.failed
    manager.close()  # leaving with another error: this one is not raised, and nothing counts as saved
    assert manager.saved is None and not manager.failed


def test_leaving_waits_for_a_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, SETTINGS, Alone())
    folder = manager.save(1, rows(torch.ones(2, 1), 0, 1), {"step": 1})
    manager.close()
    assert manager.saved == folder and stored(folder, (2, 1)).eq(1).all()


@pytest.mark.parametrize("in_background", [True, False])
def test_every_second_save_is_exported(tmp_path: Path, in_background: bool) -> None:
    settings = Checkpoint("test", save_interval=5, export_every=2, keep_last=1, async_save=in_background)
    card = Card("qwen3", {"w": "BF16"}, texts={"config.json": json.dumps({"model_type": "qwen3"})})
    manager = CheckpointManager(tmp_path, settings, Alone(), card)
    for step in (5, 10, 15, 20, 23):
        manager.save(step, rows(torch.full((2, 1), float(step)), 0, 1), {"step": step})
    manager.wait()
    assert sorted(p.name for p in (tmp_path / "hf_steps").iterdir()) == ["step_00000010", "step_00000020"]
    from safetensors.torch import load_file

    tensor = load_file(tmp_path / "hf_steps" / "step_00000010" / "model.safetensors")["w"]
    assert tensor.dtype == torch.bfloat16 and tensor.eq(10).all()
