"""The checkpoints of one run: saving, the newest, and which to keep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from engine.backends.base import Slice
from engine.checkpoint.agree import Ranks, agree, attempt
from engine.checkpoint.background import BackgroundSave, HostCopies
from engine.checkpoint.card import Card
from engine.checkpoint.config import DTYPE_OF
from engine.checkpoint.hf import export_hf
from engine.checkpoint.index import STATE, read_json
from engine.checkpoint.paths import CHECKPOINTS, complete, find_checkpoint, newest, step_folder
from engine.checkpoint.sharded import prepare, save_sharded
from engine.checkpoint.swap import discard, unfinished
from engine.errors import UserError
from engine.schema import Checkpoint

BEST = "best.json"
EXPORTS = "hf_steps"  # what `checkpoint.export_every` writes
CLOSE_S = 60.0


class CheckpointManager:
    """Saves under `run_dir/checkpoints` and keeps the last N, the best by validation loss and every Mth step.

    `card` may be set later, but before the first save; without one a checkpoint cannot be exported by itself.
    `saved` is the last checkpoint that is complete: what this run resumed from, then what it saved.
    """

    def __init__(
        self, run_dir: Path, settings: Checkpoint, comm: Ranks, card: Card | None = None, pin_memory: bool = False
    ) -> None:
        self.run_dir, self.settings, self.comm, self.card = run_dir, settings, comm, card
        self.saved: Path | None = None
        self._copies = HostCopies(pin_memory)
        self._saving: BackgroundSave | None = None

    def newest(self) -> Path | None:
        """The newest complete checkpoint of this run."""
        return newest(self.run_dir)

    def resume_from(self, resume: str | None) -> Path | None:
        """The checkpoint that `checkpoint.resume` means: `auto` is this run's newest, if it has one."""
        if resume is not None:
            self.saved = self.newest() if resume == "auto" else find_checkpoint(Path(resume))
        return self.saved

    def save(self, step: int, slices: Iterable[Slice], state: dict[str, Any], needed_bytes: int | None = None) -> Path:
        """Write a checkpoint, then delete those no longer kept. Collective. Returns the folder, complete or to be.

        With `checkpoint.async_save` this returns when the slices are copied, and waits first for the save before.
        `state["val_loss"]`, if given, decides which checkpoint is the best. `needed_bytes` is an estimate of the size
        over all ranks; without it the size of the newest checkpoint serves. UserError if the disk is full, now or from
        the next save or `wait`.
        """
        self.wait()
        folder = step_folder(self.run_dir, step)
        if needed_bytes is None and self.comm.rank == 0:
            needed_bytes = _size(self.newest())
        if self.settings.async_save:
            temporary = unfinished(folder)
            agree(self.comm, attempt(lambda: prepare(folder, temporary, needed_bytes)) if self.comm.rank == 0 else None)
            copies, card = self._copies.take(slices), self.card or Card()
            self._saving = BackgroundSave(folder, copies, state, self.comm, card, partial(self._afterwards, step))
        else:
            save_sharded(folder, slices, state, self.comm, self.card, needed_bytes, finite=True)
            agree(self.comm, attempt(partial(self._afterwards, step)) if self.comm.rank == 0 else None)
            self.saved = folder
        return folder

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank: `wait` then raises on every one."""
        return self._saving is not None and self._saving.failed

    def wait(self) -> None:
        """Return when no save is under way. Collective; raises its UserError on every rank if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
            self.saved = saving.folder

    def close(self, timeout: float = CLOSE_S) -> None:
        """Give a save that is under way the time to end. Not collective: for a rank that leaves with an error."""
        saving, self._saving = self._saving, None
        if saving is not None and saving.join(timeout) and saving.folder.is_dir():
            self.saved = saving.folder

    def _afterwards(self, step: int) -> None:
        """What follows a complete checkpoint. By one rank."""
        self._retain(step)
        every, dtype = self.settings.export_every, self.settings.export_dtype
        if every and step % (every * (self.settings.save_interval or 1)) == 0:
            folder = step_folder(self.run_dir, step)
            out = self.run_dir / EXPORTS / folder.name
            out.parent.mkdir(exist_ok=True)
            export_hf(folder, out, DTYPE_OF[dtype] if dtype else None, replace=True)

    def _retain(self, step: int) -> None:
        """Delete what the settings do not keep, now that the checkpoint of `step` is complete.

        Later steps than this one are left from before a resume from an earlier checkpoint; this run's history no
        longer holds them.
        """
        found = complete(self.run_dir / CHECKPOINTS)
        best = best_step({s: path for s, path in found.items() if s <= step})
        if best is not None and self.settings.keep_best:
            self._mark(best, found[best])
        keep = kept_steps([s for s in found if s <= step], best, self.settings)
        for other, path in found.items():
            if other not in keep:
                discard(path)

    def _mark(self, step: int, folder: Path) -> None:
        marker = self.run_dir / CHECKPOINTS / BEST
        temporary = marker.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": step, "val_loss": _val_loss(folder), "folder": folder.name}) + "\n")
        temporary.replace(marker)


def kept_steps(steps: list[int], best: int | None, settings: Checkpoint) -> set[int]:
    """Which of the complete checkpoints stay. The newest always does."""
    ordered = sorted(steps)
    keep = set(ordered[-max(1, settings.keep_last) :])
    if settings.keep_best and best is not None:
        keep.add(best)
    if settings.keep_every:
        keep |= {s for s in ordered if s % settings.keep_every == 0}
    return keep


def best_step(found: dict[int, Path]) -> int | None:
    """The step with the lowest finite validation loss; the earlier one of equals."""
    losses = {step: loss for step, path in found.items() if (loss := _val_loss(path)) is not None}
    return min(losses, key=lambda s: (losses[s], s), default=None)


def _val_loss(folder: Path) -> float | None:
    try:
        value = read_json(folder / STATE).get("val_loss")
    except UserError:
        return None  # damaged since: it is no candidate, and no reason to stop a run
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _size(folder: Path | None) -> int | None:
    """Bytes of a checkpoint on the disk."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder else None
