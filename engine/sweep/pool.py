"""The processes of a sweep: several at a time, each in a place of its own, all of them stopped by one signal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from engine.launch.signals import STOPPING
from engine.launch.supervise import signal_at_parents_end
from engine.sweep.rows import Row
from engine.sweep.slots import Slots

POLL_S = 0.1


@dataclass
class Running:
    """A run's process and where it writes; without a log it has the terminal."""

    number: int  # of the row
    row: Row
    process: subprocess.Popen[bytes]
    slot: int
    log: Path | None
    begin: float = field(default_factory=time.monotonic)


class Pool:
    """Runs at the same time, at most one in each slot."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.running: list[Running] = []
        self.received: list[int] = []  # signals that asked the sweep to stop

    def free(self) -> list[int]:
        """Slots without a run."""
        taken = {run.slot for run in self.running}
        return [slot for slot in range(len(self.slots)) if slot not in taken]

    def start(self, number: int, row: Row, command: list[str], log: Path | None) -> Running:
        """Start a run in the first free slot."""
        slot = self.free()[0]
        environment = {**os.environ, **self.slots.environments[slot]}
        output = log.open("wb") if log else None
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL if log else None,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
                preexec_fn=_as_a_run,
            )
        finally:
            if output:
                output.close()
        run = Running(number, row, process, slot, log)
        self.running.append(run)
        for received in self.received:  # came while it was being started
            process.send_signal(received)
        return run

    def stop(self, number: int) -> None:
        """Pass a signal to all runs: they save and stop, at the second one at once."""
        for run in self.running:
            if run.process.poll() is None:
                run.process.send_signal(number)

    def wait(self, tick: Callable[[list[Running]], None]) -> list[Running]:
        """The runs that have ended, at least one, taken out of their slots; `tick` is called while there is none."""
        while not (ended := [run for run in self.running if run.process.poll() is not None]):
            tick(self.running)
            time.sleep(POLL_S)
        self.running = [run for run in self.running if run not in ended]
        return ended

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within this a signal to stop goes to all runs and is noted in `received`."""

        def forward(number: int, _frame: FrameType | None) -> None:
            self.received.append(number)
            self.stop(number)

        previous = {number: signal.signal(number, forward) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _as_a_run() -> None:
    """In a run's process: signals come from the sweep alone, and if the sweep is killed, the run saves and stops."""
    os.setpgid(0, 0)
    signal_at_parents_end(signal.SIGTERM)
