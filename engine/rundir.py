"""The run folder: made, locked, frozen into, pointed to by `latest`, and taken back if nothing came of the run."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.paths import CHECKPOINTS, complete
from engine.errors import UserError
from engine.freeze import to_yaml
from engine.schema import Run

CONFIG = "config.yaml"
COMMAND = "command.txt"
LATEST = "latest"
# Jobs that leave something behind which later commands want to name as outputs/<family>/latest.
POINTED_TO = ("train", "forward", "convert")
PRODUCTS = ("metrics.jsonl", "hf", "sharded", "outputs.safetensors")


def new_run_id() -> str:
    """A time stamp that sorts, and four characters so that two runs of one second differ."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def run_folder(run: Run) -> Path:
    """`<output_dir>/<family>/<run_id>`."""
    return Path(run.output_dir) / run.family / str(run.run_id)


@dataclass
class RunFolder:
    """A run folder that this process holds. Its lock lives as long as any process that inherits `lock`."""

    path: Path
    lock: int  # a file descriptor under flock
    created: bool
    config: Path
    previous_config: str | None = None
    previous_latest: str | None = None
    started: float = 0.0

    def logs(self, rank: int) -> Path:
        """Where a rank without the terminal writes."""
        (self.path / "logs").mkdir(exist_ok=True)
        return self.path / "logs" / f"rank_{rank}.log"

    def kept(self) -> bool:
        """Whether the run left anything worth keeping."""
        if complete(self.path / CHECKPOINTS):
            return True
        return any(
            (self.path / name).is_dir() or ((self.path / name).is_file() and (self.path / name).stat().st_size > 0)
            for name in PRODUCTS
        )

    def take_back(self) -> None:
        """Undo `open_folder`, as if the run had never been started."""
        if not self.created:
            if self.previous_config is not None:
                _replace_text(self.config, self.previous_config)
            return
        shutil.rmtree(self.path, ignore_errors=True)
        latest = self.path.parent / LATEST
        if latest.is_symlink() and str(latest.readlink()) == self.path.name:
            if self.previous_latest is None:
                latest.unlink()
            else:
                _point(latest, self.previous_latest)


def open_folder(run: Run, command: str, resuming: bool = False) -> RunFolder:
    """Make or reopen the run folder of a resolved run, lock it, freeze the config into it and move `latest`.

    On nodes after the first only the config (under a name of its own) and the logs are written.
    Raises UserError if the folder is in use, holds a run and this is not `resuming` it, or cannot be written.
    """
    path, node = run_folder(run), run.launcher.node_rank or 0
    suffix = f".node{node}" if node else ""
    config = path / f"config{suffix}.yaml"
    created = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path, suffix)
        previous = config.read_text() if config.is_file() else None
        if previous is not None and not node and not resuming:
            raise UserError(
                f"{path}: this run exists; add checkpoint.resume=auto to continue it, or choose another run_id"
            )
        folder = RunFolder(path, lock, created=created, config=config, previous_config=previous, started=time.time())
        if not node:
            folder.previous_latest = _read_link(path.parent / LATEST)
            if not (path / COMMAND).exists():
                _replace_text(path / COMMAND, command + "\n")
            if run.job.name in POINTED_TO:
                _point(path.parent / LATEST, path.name)
        _replace_text(config, to_yaml(run))
    except OSError as error:
        raise UserError(
            f"{path}: the run folder cannot be written ({error.strerror}); output_dir names another place"
        ) from None
    return folder


def _lock(path: Path, suffix: str) -> int:
    """Hold the folder's lock; it is released when the last process that has the descriptor is gone."""
    descriptor = os.open(path / f".lock{suffix}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise UserError(
            f"{path}: in use by a running job (process {holder}); wait until it ends, or choose another run_id"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _read_link(link: Path) -> str | None:
    return str(link.readlink()) if link.is_symlink() else None


def _point(link: Path, target: str) -> None:
    """Move a symbolic link in one step."""
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link}: should be a link to the newest run and is something else; move it away")
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(link)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
