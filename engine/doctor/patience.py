"""How long to wait for a process that may hang, or may only be held up by a busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MAJOR_FAULTS = 9  # place in /proc/PID/stat after the name: pages that had to come from the disk (proc(5))


@dataclass(frozen=True)
class Usage:
    """What the system says of a process so far."""

    delayed_s: float = 0.0  # for which its most delayed thread was ready to run and got no processor
    faults: int = 0  # pages that it had to wait for


def usage(pid: int) -> Usage:
    """Of a running process; nothing where the system does not tell."""
    delays = []
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            delays.append(int(task.read_text().split()[1]) / 1e9)  # ns on a run queue (the kernel's sched-stats.rst)
        except (OSError, IndexError, ValueError):
            continue  # the thread has ended
    try:
        faults = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[MAJOR_FAULTS])
    except (OSError, IndexError, ValueError):
        faults = 0
    return Usage(max(delays, default=0.0), faults)


class Patience:
    """`limit_s` for each stretch between two signs of progress, in time that the process could have used.

    What it waited for a processor, and looks between which it waited for a page from the disk, do not count: on a busy
    machine it may take any time, while one that hangs, asleep or in a loop, uses its limit up.
    """

    def __init__(self, limit_s: float, look: Callable[[], Usage], clock: Callable[[], float] = time.monotonic):
        self.limit_s, self._look, self._clock = limit_s, look, clock
        self.progress()

    def progress(self) -> None:
        """The process has come on: it gets the whole limit anew."""
        self._at, self._seen = self._clock(), self._look()
        self.spent_s = self.held_up_s = 0.0

    def over(self) -> bool:
        """Look at the process; whether its limit is used up."""
        at, seen = self._clock(), self._look()
        passed = at - self._at
        delayed = min(passed, max(0.0, seen.delayed_s - self._seen.delayed_s))
        held_up = passed if seen.faults > self._seen.faults else delayed
        self.held_up_s += held_up
        self.spent_s += passed - held_up
        self._at, self._seen = at, seen
        return self.spent_s >= self.limit_s

    def words(self) -> str:
        """How long it was waited for, and how busy the machine was."""
        if self.held_up_s < 1.0:
            return f"no answer for {self.limit_s:g} s: it hangs"
        load, cores = os.getloadavg()[0], os.cpu_count()
        return (
            f"no answer for {self.spent_s + self.held_up_s:.0f} s: it hangs, for {self.held_up_s:.0f} s of them it "
            f"waited for a processor or the disk (load {load:.0f} on {cores} cores)"
        )
