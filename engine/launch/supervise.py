"""Waiting for a set of processes that succeed or fail together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from engine.errors import EXIT_INTERRUPTED
from engine.faults.board import Board
from engine.launch.verdict import Verdict, failure, of_note, order
from engine.launch.watchdog import Watchdog

PR_SET_PDEATHSIG = 1  # prctl(2)
GRACE_S = 4.0  # for the other ranks to notice a failure by themselves and say so
POLL_S = 0.05
SAME_S = 1.0  # signals this close together are one
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTHING_SAVED = "stopped before there was anything to save"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Worker:
    """A process, what it is called, and its log; without a log it writes to the terminal.

    `ranks` gives the processes that do its work, where it only starts them: they know better why it failed.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None
    ranks: Callable[[], list[int]] | None = None
    killed: bool = False  # by the launcher

    @property
    def status(self) -> int | None:
        """None while it runs; 128 + the number of the signal that ended it, as a shell says it."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def stop(self) -> None:
        """Ask it, or its ranks if it has any, to save and stop."""
        pids = self.ranks() if self.ranks else []
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if not pids:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.killed = True
        for pid in self.ranks() if self.ranks else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()


def die_with_parent() -> None:
    """In a child before it becomes the worker: a process group of its own, and an end when the controller ends.

    The own group keeps a Ctrl-C at the terminal from reaching the workers past the controller, which passes it on once.
    """
    os.setpgid(0, 0)
    signal_at_parents_end(signal.SIGKILL)


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when the process that started it is gone, however it went."""
    _libc.prctl(PR_SET_PDEATHSIG, number)


def supervise(workers: list[Worker], board: Board | None = None, watchdog: Watchdog | None = None) -> Verdict:
    """Wait for all workers; the status of the one that was the cause if any failed, and why.

    When one fails the others get a few seconds and are then killed: they would wait for it for ever. A worker that
    saved and stopped (75) is no failure that others hang on, so there all are waited for.
    """
    failed: list[Worker] = []  # by themselves, in the order seen
    stall: Verdict | None = None
    deadline: float | None = None
    with _signals_to(workers, board) as received:
        while any(worker.status is None for worker in workers):
            _add_failed(failed, workers)
            if deadline is None and any(worker.status != EXIT_INTERRUPTED for worker in failed):
                deadline = time.monotonic() + GRACE_S
            if deadline is None and watchdog is not None and (stall := watchdog.stall()) is not None:
                deadline = 0.0
            if deadline is not None and time.monotonic() > deadline:
                _kill(workers)
            time.sleep(POLL_S)
    if stall is not None:
        return stall
    if len(received) > 1:
        return Verdict(128 + received[0], "ended at once, as the second signal asked")
    _add_failed(failed, workers)
    return _verdict(failed, board, received)


def _verdict(failed: list[Worker], board: Board | None, received: list[int]) -> Verdict:
    """What the workers that failed by themselves come to."""
    if not failed:
        return Verdict(0)
    notes = {seen.pid: seen for seen in board.seen() if seen.note} if board is not None else {}
    codes = {(seen.note or {}).get("code") for seen in notes.values()}
    only_starts = failed[0].ranks is not None
    told = codes == {EXIT_INTERRUPTED} and (only_starts or bool(received))
    if told or all(worker.status == EXIT_INTERRUPTED for worker in failed):
        said = [str((seen.note or {}).get("message")) for seen in notes.values()]
        return Verdict(EXIT_INTERRUPTED, said[0] if said else None)
    killed = [worker for worker in failed if worker.status == 128 + signal.SIGTERM]
    if received and (killed or only_starts):
        return Verdict(128 + received[0], NOTHING_SAVED)
    pages = {seen.pid: seen for seen in board.seen()} if board is not None else {}
    found = [failure(w.name, w.status or 0, pages.get(w.process.pid), w.log) for w in failed]
    if only_starts:
        found = [of_note(seen) for seen in notes.values()] or found
    return min(found, key=order)


def _add_failed(failed: list[Worker], workers: list[Worker]) -> None:
    """Append those that have failed since; a killed one first, for the others may have failed for want of it."""
    new = [worker for worker in workers if worker.status and not worker.killed and worker not in failed]
    failed.extend(sorted(new, key=lambda worker: (worker.status or 0) <= 128))


@contextmanager
def _signals_to(workers: list[Worker], board: Board | None) -> Iterator[list[int]]:
    """Pass the first signal on as SIGTERM, which asks workers to save and stop; at the second one kill them.

    Those that come within a second of the first are the same one: `timeout`, `uv run` and schedulers signal both a
    process and its group, or pass on what the group got too.
    """
    received: list[int] = []
    ignored_until = 0.0

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal ignored_until
        if time.monotonic() < ignored_until:
            return None
        ignored_until = time.monotonic() + SAME_S
        received.append(number)
        if len(received) > 1:
            return _kill(workers)
        saving = board is not None and any(seen.beats for seen in board.seen())
        what = "stopping: saving a checkpoint" if saving else "stopping"
        print(f"{what}; once more ends the run at once", file=sys.stderr, flush=True)
        for worker in workers:
            if worker.status is None:
                worker.stop()

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        if worker.status is None:
            worker.kill()
