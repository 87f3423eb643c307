"""Which checkpoints a run keeps, and which one it resumes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.base import Slice
from engine.checkpoint.agree import Alone
from engine.checkpoint.card import Card, read_card
from engine.checkpoint.manager import CheckpointManager, kept_steps
from engine.checkpoint.paths import find_checkpoint
from engine.checkpoint.reader import ShardedSource
from engine.errors import UserError
from engine.schema import Checkpoint


@pytest.fixture(params=[False, True], ids=["sync", "async"], autouse=True)
def background(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rule holds for both ways of saving."""
    monkeypatch.setattr(Checkpoint, "async_save", request.param)


def manager(root: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(root, Checkpoint("test", async_save=Checkpoint.async_save, **settings), Alone())


def save(m: CheckpointManager, step: int, val_loss: float | None = None) -> Path:
    part = Slice("param", "w", (2,), (0,), torch.full((2,), float(step)))
    folder = m.save(step, [part], {"step": step, "val_loss": val_loss})
    m.wait()
    assert m.saved == folder
    return folder


def steps(root: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (root / "checkpoints").iterdir() if p.is_dir())


def test_last_best_and_every(tmp_path: Path) -> None:
    m = manager(tmp_path, keep_last=2, keep_best=True, keep_every=40)
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: float("nan"), 60: None, 70: 1.0, 80: 5.0}
    for step, loss in losses.items():
        save(m, step, loss)
    # 70, 80: the last; 20: the best, and the earlier one of equals; 40, 80: multiples of 40.
    assert steps(tmp_path) == [20, 40, 70, 80]
    marker = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert marker == {"step": 20, "val_loss": 1.0, "folder": "step_00000020"}
    assert m.newest() == tmp_path / "checkpoints" / "step_00000080"


def test_best_follows_a_better_one(tmp_path: Path) -> None:
    m = manager(tmp_path, keep_last=1)
    for step, loss in {1: 3.0, 2: 2.0, 3: 4.0}.items():
        save(m, step, loss)
    assert steps(tmp_path) == [2, 3]


def test_without_best(tmp_path: Path) -> None:
    m = manager(tmp_path, keep_last=1, keep_best=False)
    for step in (1, 2, 3):
        save(m, step, float(step))
    assert steps(tmp_path) == [3]
    assert not (tmp_path / "checkpoints" / "best.json").exists()


def test_newest_always_stays() -> None:
    settings = Checkpoint(name="test", keep_last=0, keep_best=True)
    assert kept_steps([1, 2, 3], 1, settings) == {1, 3}


def test_nothing_is_deleted_before_the_new_one_is_complete(tmp_path: Path) -> None:
    m = manager(tmp_path, keep_last=1, keep_best=False)
    save(m, 1)

    def dies() -> Any:
        assert (tmp_path / "checkpoints" / "step_00000001").is_dir()
        yield Slice("param", "w", (2,), (0,), torch.zeros(1))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        m.save(2, dies(), {"step": 2})
    assert m.newest() == tmp_path / "checkpoints" / "step_00000001"
    assert ShardedSource(m.newest()).read("param", "w", (2,), (0,), (2,)).tolist() == [1.0, 1.0]


def test_going_back_drops_the_abandoned_branch(tmp_path: Path) -> None:
    """After a resume from step 10, what an earlier attempt had saved at 20 is no later state of this run."""
    m = manager(tmp_path, keep_last=3, keep_every=20)
    for step in (10, 20):
        save(m, step, 5.0 - step / 10)
    save(m, 15, 4.5)
    assert steps(tmp_path) == [10, 15]
    assert m.newest() == tmp_path / "checkpoints" / "step_00000015"


def test_resume_from(tmp_path: Path) -> None:
    m = manager(tmp_path)
    assert m.resume_from(None) is None
    assert m.resume_from("auto") is None
    with pytest.raises(UserError, match="no complete checkpoint"):
        m.resume_from(str(tmp_path))
    with pytest.raises(UserError, match="no such folder"):
        m.resume_from(str(tmp_path / "nowhere"))
    first, second = save(m, 1), save(m, 2)
    (tmp_path / "checkpoints" / "step_00000003.tmp").mkdir()
    (tmp_path / "checkpoints" / "step_00000004").mkdir()  # no index: not complete
    assert m.resume_from("auto") == second
    assert m.resume_from(str(tmp_path)) == second
    assert m.resume_from(str(first)) == first
    link = tmp_path / "latest"
    link.symlink_to(tmp_path)
    assert find_checkpoint(link).name == "step_00000002"
    assert find_checkpoint(tmp_path / "checkpoints") == second


def test_too_little_room_is_seen_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = manager(tmp_path)
    save(m, 1)
    monkeypatch.setattr("engine.checkpoint.sharded.shutil.disk_usage", lambda _: type("U", (), {"free": 1000}))
    with pytest.raises(UserError, match="no room"):
        save(m, 2)
    assert steps(tmp_path) == [1]


def test_the_tokenizer_outlives_the_checkpoint_that_was_resumed(tmp_path: Path) -> None:
    """A resumed run has its tokenizer from a checkpoint that it deletes once there are newer ones."""
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    first = manager(tmp_path, keep_last=1, keep_best=False)
    first.card = Card("qwen3", tokenizer=tmp_path / "tok")
    resumed = save(first, 1)
    second = manager(tmp_path, keep_last=1, keep_best=False)
    second.card = read_card(resumed)
    for step in (2, 3):
        last = save(second, step)
    assert steps(tmp_path) == [3] and (last / "tokenizer" / "tokenizer.json").read_text() == "{}"
