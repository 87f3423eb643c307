"""The run folder: made, locked, frozen into, pointed to by `latest`, and taken back if nothing came of the run."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.checkpoint.paths import CHECKPOINTS, complete
from engine.errors import UserError
from engine.freeze import to_yaml
from engine.schema import Run

CONFIG = "config.yaml"
COMMAND = "command.txt"  # one line for each start
OVERRIDES = "overrides.json"  # the words of those commands together: what a resume takes up again
LATEST = "latest"
POINTED_TO = "train"  # the job whose runs are outputs/<family>/latest, which later commands sample and continue
PRODUCTS = ("metrics.jsonl", "hf", "sharded", "outputs.safetensors", "results.jsonl")


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
    created: tuple[Path, ...]  # the folders made for it, the innermost first; none if it was there
    config: Path
    previous: dict[Path, str | None] = field(
        default_factory=dict
    )  # texts that were replaced; None where there was none
    previous_latest: str | None = None
    started: float = 0.0

    def logs(self, rank: int) -> Path:
        """Where a rank without the terminal writes."""
        (self.path / "logs").mkdir(exist_ok=True)
        return self.path / "logs" / f"rank_{rank}.log"

    def kept(self) -> bool:
        """Whether the run left anything worth keeping; what was there before a resume does not count."""
        products = [*complete(self.path / CHECKPOINTS).values(), *(self.path / name for name in PRODUCTS)]
        return any(path.exists() and self._is_product(path) for path in products)

    def _is_product(self, path: Path) -> bool:
        state = path.stat()
        fresh = bool(self.created) or state.st_mtime >= self.started
        return fresh and (path.is_dir() or state.st_size > 0)

    def take_back(self) -> None:
        """Undo `open_folder`, as if the run had never been started."""
        latest = self.path.parent / LATEST
        if latest.is_symlink() and str(latest.readlink()) == self.path.name:
            if self.previous_latest is not None:
                _point(latest, self.previous_latest)
            elif self.created:
                latest.unlink()
        if self.created:
            return remove_folders(self.created)
        for path, text in self.previous.items():
            if text is None:
                path.unlink(missing_ok=True)
            else:
                _replace_text(path, text)

    def replace(self, path: Path, text: str) -> None:
        """Write a text that `take_back` undoes."""
        self.previous[path] = path.read_text() if path.is_file() else None
        _replace_text(path, text)


def open_folder(
    run: Run, command: str, resuming: bool = False, words: Sequence[str] = (), place: Path | None = None
) -> RunFolder:
    """Make or reopen the run folder of a resolved run, lock it, freeze the config into it and move `latest`.

    `words` are kept for a resume. `place` is the folder, where it is another one than `run_folder` says.
    On nodes after the first only the config (under a name of its own) and the logs are written.
    Raises UserError if the folder is in use, holds a run and this is not `resuming` it, or cannot be written.
    """
    path, node = place or run_folder(run), run.launcher.node_rank or 0
    suffix = f".node{node}" if node else ""
    try:
        created = tuple(folder for folder in (path, *path.parents[:2]) if not folder.exists())
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path, hold(path, suffix), created, path / f"config{suffix}.yaml", started=time.time())
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        _fill(folder, run, command, words, first=not node, resuming=resuming)
    except (UserError, OSError) as error:
        remove_folders(created)
        os.close(folder.lock)
        raise error if isinstance(error, UserError) else _unwritable(path, error) from None
    return folder


def _fill(folder: RunFolder, run: Run, command: str, words: Sequence[str], first: bool, resuming: bool) -> None:
    """Write what a run folder begins with; on other nodes than the `first` that is the config alone."""
    path, latest = folder.path, folder.path.parent / LATEST
    if first:
        if folder.config.is_file() and not resuming:
            raise UserError(
                f"{path}: this run exists; add checkpoint.resume=auto to continue it, or choose another run_id"
            )
        folder.previous_latest = str(latest.readlink()) if latest.is_symlink() else None
        before = (path / COMMAND).read_text() if (path / COMMAND).is_file() else ""
        folder.replace(path / COMMAND, f"{before}{command}\n")
        if run.job.name == "train":
            folder.replace(path / OVERRIDES, json.dumps(list(words), indent=1) + "\n")
    folder.replace(folder.config, to_yaml(run))
    if first and run.job.name == POINTED_TO and path.parent.name == run.family:
        _point(latest, path.name)


def remove_folders(created: tuple[Path, ...]) -> None:
    """Remove a run folder made just now, and the folders above it that were made for it and hold nothing else."""
    for number, folder in enumerate(created):
        if number == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with suppress(OSError):
                folder.rmdir()


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: the run folder cannot be written ({error.strerror}); output_dir names another place")


def hold(path: Path, suffix: str = "", instead: str = ", or choose another run_id") -> int:
    """Hold the folder's lock; it is released when the last process that has the descriptor is gone.

    `instead` says what else could be done if another process holds it.
    """
    descriptor = os.open(path / f".lock{suffix}", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = os.read(descriptor, 512).decode(errors="replace").split()
        os.close(descriptor)
        raise UserError(f"{path}: in use by a running job ({_holder(said, path / f'.lock{suffix}')}{instead}") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _holder(said: list[str], lock: Path) -> str:
    """Who holds a lock, as it wrote there, and how that ends."""
    here = socket.gethostname()
    pid, host = said[0] if said else "", said[1] if len(said) > 1 else here
    if not pid.isdigit():
        return f"of a process that `fuser {lock}` names); wait until it ends"
    if host != here:
        return f"process {pid} on {host}); wait until it ends, stop it there with `kill {pid}`"
    if not Path("/proc", pid).exists():
        return f"process {pid} has ended, but not all that it started: `fuser {lock}` names them); end those"
    return f"process {pid}); wait until it ends, stop it with `kill {pid}`"


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
