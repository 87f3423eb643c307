"""Replacing and deleting folders so that a kill at any moment leaves one of them whole and findable. Free of torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.checkpoint.card import sync_folder

ASIDE = ".replaced"  # behind the name of a folder that makes way: until the new one has the name, it stands for it
UNFINISHED = ".tmp"  # behind the name of what is being written or deleted: of no use to anybody


def aside_of(folder: Path) -> Path:
    """Where a folder lies between the two renames that replace it."""
    return folder.with_name(folder.name + ASIDE)


def unfinished(folder: Path) -> Path:
    """Where a folder is written, and where it is deleted."""
    return folder.with_name(folder.name + UNFINISHED)


def put(new: Path, folder: Path) -> None:
    """Give a complete folder its name, and delete what had it before.

    No system call swaps two folders on every file system, so there is a moment without the name: whoever looks for
    `folder` then takes `aside_of(folder)`.
    """
    if folder.exists():
        discard(aside_of(folder))
        folder.rename(aside_of(folder))
    new.rename(folder)
    sync_folder(folder.parent)
    discard(aside_of(folder))


def discard(folder: Path) -> None:
    """Delete a folder, if it is there: renamed first, since half a folder under its name would look whole."""
    doomed = unfinished(folder)
    if folder.exists():
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo a replacement that a kill cut short between its renames."""
    if aside_of(folder).exists() and not folder.exists():
        aside_of(folder).rename(folder)
