"""Waiting for a set of processes that succeed or fail together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from engine.errors import EXIT_INTERRUPTED, EXIT_USER

PR_SET_PDEATHSIG = 1  # prctl(2)
GRACE_S = 4.0  # for the other ranks to notice a failure by themselves and say so
POLL_S = 0.05
LOG_LINES = 15
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Worker:
    """A process, what it is called, and its log; without a log it writes to the terminal."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None

    @property
    def status(self) -> int | None:
        """None while it runs; 128 + the number of the signal that ended it, as a shell says it."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code


def die_with_parent() -> None:
    """In a child before it becomes the worker: a process group of its own, and an end when the controller ends.

    The own group keeps a Ctrl-C at the terminal from reaching the workers past the controller, which passes it on once.
    """
    os.setpgid(0, 0)
    signal_at_parents_end(signal.SIGKILL)


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when the process that started it is gone, however it went."""
    _libc.prctl(PR_SET_PDEATHSIG, number)


def supervise(workers: list[Worker]) -> int:
    """Wait for all workers; the status of the first that failed, or 0.

    When one fails the others get a few seconds and are then killed: they would wait for it for ever. A worker that
    saved and stopped (75) is no failure that others hang on, so there all are waited for.
    """
    first: Worker | None = None
    deadline: float | None = None
    with _signals_to(workers) as received:
        while any(worker.status is None for worker in workers):
            if first is None:
                first = _first_failure(workers)
            if first is not None and deadline is None and first.status != EXIT_INTERRUPTED:
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                _kill(workers)
            time.sleep(POLL_S)
    first = first or _first_failure(workers)
    if first is None:
        return 0
    status = first.status or 0
    if received and status == 128 + signal.SIGTERM:
        print("stopped before there was anything to save", file=sys.stderr)
        return 128 + received[0]
    _explain(first, status, workers)
    return status


def _first_failure(workers: list[Worker]) -> Worker | None:
    """Of those that failed within one poll, the likeliest cause: a killed one, then one that explained itself."""
    failed = [worker for worker in workers if worker.status]
    return min(failed, key=lambda w: (w.status <= 128, w.status != EXIT_USER), default=None)


@contextmanager
def _signals_to(workers: list[Worker]) -> Iterator[list[int]]:
    """Pass the first signal on as SIGTERM, which asks workers to save and stop; at the second one kill them."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            return _kill(workers)
        print("stopping: saving a checkpoint; once more ends the run at once", file=sys.stderr)
        for worker in workers:
            if worker.status is None:
                worker.process.send_signal(signal.SIGTERM)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        if worker.status is None:
            worker.process.kill()


def _explain(first: Worker, status: int, workers: list[Worker]) -> None:
    """Say which worker failed, unless a worker with the terminal has said why."""
    if status == EXIT_INTERRUPTED:
        return
    if status == EXIT_USER:
        if not any(w.log is None and w.status == EXIT_USER for w in workers):
            print("\n".join(_errors(first.log)), file=sys.stderr)
        return
    how = f"was killed by {signal.Signals(status - 128).name}" if status > 128 else f"ended with exit status {status}"
    hint = "; the system does this when memory runs out" if status == 128 + signal.SIGKILL else ""
    print(f"error: {first.name} {how}{hint}", file=sys.stderr)
    if first.log is not None:
        print(f"the last lines of {first.log}:", file=sys.stderr)
        for line in _tail(first.log)[-LOG_LINES:]:
            print(f"  {line}", file=sys.stderr)


def _errors(log: Path | None) -> list[str]:
    """The `error:` lines at a log's end, with what follows each."""
    lines = _tail(log)
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    return lines[starts[-1] :] if starts else [f"error: a worker refused to start; its log is {log}"]


def _tail(log: Path | None, size: int = 16384) -> list[str]:
    if log is None or not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace").splitlines()
