"""Folders that are built once and then shared: written under a temporary name and renamed when complete."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import UserError


def cached(folder: Path, build: Callable[[Path], None]) -> bool:
    """Make sure that `folder` exists and is complete; True if it was there already.

    `build` fills an empty temporary folder. Processes that come at the same time wait for the first one; what a killed
    process left behind is removed. Raises UserError if the place cannot be written.
    """
    if folder.is_dir():
        return True
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{folder.name}.lock") as alone:
            if folder.is_dir():
                return True
            if alone:
                for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
                    shutil.rmtree(stale, ignore_errors=True)
            _build(folder, build)
    except OSError as error:
        raise UserError(
            f"cannot write '{folder}' ({error.strerror or error}); name another place with data.cache_dir=DIR"
        ) from error
    return False


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp's 0700 would hide the cache from other users of a shared disk
        build(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise a process that shares no lock with this one was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock file; yields False where the file system has no locks (two may then build, which is safe)."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)
