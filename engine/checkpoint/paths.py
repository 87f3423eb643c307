"""Where a run's checkpoints are. Free of torch."""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoint.index import INDEX, STATE
from engine.checkpoint.swap import ASIDE, aside_of
from engine.errors import UserError

CHECKPOINTS = "checkpoints"
STEP = re.compile(r"step_(\d{8,})")


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step_{step:08d}"


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a sharded checkpoint of ours."""
    return (folder / INDEX).is_file() and (folder / STATE).is_file()


def complete(checkpoints: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder by step, oldest first. Unfinished ones have other names.

    A save that a kill cut short while it replaced a checkpoint has left the older one aside, which then counts.
    """
    found: dict[int, Path] = {}
    # Those that stand aside come first, so that the one that has the name wins.
    for path in sorted(checkpoints.iterdir() if checkpoints.is_dir() else (), key=lambda p: not p.name.endswith(ASIDE)):
        if (match := STEP.fullmatch(path.name.removesuffix(ASIDE))) and is_checkpoint(path):
            found[int(match.group(1))] = path
    return dict(sorted(found.items()))


def newest(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run folder."""
    return next(reversed(complete(run_dir / CHECKPOINTS).values()), None)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest one of a run folder. UserError if there is none."""
    if is_checkpoint(path):
        return path
    if is_checkpoint(aside_of(path)):
        return aside_of(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; give a run folder or one of its checkpoints/step_* folders")
    found = newest(path) or next(reversed(complete(path).values()), None)
    if found is None:
        nothing_yet = (path / "config.yaml").is_file()
        right = (
            "this run has saved nothing; it may still be running; if it has ended, start it again from the beginning"
            if nothing_yet
            else "give a run folder or one of its checkpoints/step_*"
        )
        raise UserError(f"{path}: holds no complete checkpoint; {right}")
    return found
