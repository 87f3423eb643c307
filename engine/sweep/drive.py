"""Starting the runs of a sweep as slots become free, and noting what comes of them."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Protocol

from engine.errors import EXIT_INTERRUPTED
from engine.report.compare import Comparison
from engine.schema import Sweep
from engine.sweep.pool import Pool, Running
from engine.sweep.rows import RUNNING, SUMMARY, Row, reported, varied, write_summary
from engine.sweep.show import view_of
from engine.sweep.slots import Slots
from engine.sweep.words import metric_problem

ENDED = {0: "done", EXIT_INTERRUPTED: "interrupted"}
TERMINAL = "terminal.log"  # in a run's logs/: what it would have said on the terminal


class Source(Protocol):
    """Where the runs of a sweep come from."""

    rows: list[Row]  # those known so far

    @property
    def total(self) -> int: ...

    def next(self) -> Row | None: ...

    def ended(self, row: Row) -> None: ...


class Grid:
    """Runs that are all known from the beginning."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._left = iter(rows)

    @property
    def total(self) -> int:
        return len(self.rows)

    def next(self) -> Row | None:
        return next(self._left, None)

    def ended(self, row: Row) -> None:
        pass


class Drive:
    """One sweep from its first run to its last."""

    def __init__(
        self, family: str, home: Path, settings: Sweep, common: list[str], slots: Slots, source: Source
    ) -> None:
        self._family, self._home, self._settings, self._common = family, home, settings, common
        self._slots, self._source = slots, source
        self._pool = Pool(slots)
        self._view = view_of(len(slots))
        self._page = Comparison(home, family, settings, common)
        self._halted = False  # no further run is started
        self.problem: str | None = None

    @property
    def summary(self) -> Path:
        return self._home / SUMMARY

    @property
    def report(self) -> Path:
        return self._page.path

    @property
    def stopped(self) -> bool:
        return self._halted

    def run(self) -> int:
        """0 if every run succeeded, 1 if one failed, else the status of a run that was stopped."""
        ended: list[Row] = []
        try:
            with self._pool.signals():
                while True:
                    self._fill()
                    if not self._pool.running:
                        break
                    for run in self._pool.wait(self._view.tick):
                        self._close(run)
                        ended.append(run.row)
        finally:
            self._view.close()
        self._note(self._source.rows)
        if self._pool.received or self._halted:
            codes = [row.exit_status for row in ended if row.status == "interrupted"]
            return EXIT_INTERRUPTED if EXIT_INTERRUPTED in codes or not codes else codes[-1] or EXIT_INTERRUPTED
        return 0 if all(row.done for row in self._source.rows) else 1

    def _fill(self) -> None:
        """Start runs while there are slots and runs."""
        while self._pool.free() and not self._halted and not self._pool.received and self.problem is None:
            row = self._source.next()
            if row is None:
                return
            number = self._source.rows.index(row)
            row.status = RUNNING
            write_summary(self._home, self._source.rows)
            log = self._log(number) if len(self._slots) > 1 else None
            words = self._slots.words(self._pool.free()[0])
            run = self._pool.start(number, row, _command(self._family, row, words), log)
            self._view.started(run, varied(row.overrides, self._common), self._source.total)

    def _log(self, number: int) -> Path:
        folder = self._home / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"run_{number + 1}.log"

    def _close(self, run: Running) -> None:
        row, folder = run.row, Path(run.row.folder)
        row.seconds = round(time.monotonic() - run.begin, 2)
        code = run.process.returncode
        row.exit_status = code if code >= 0 else 128 - code
        row.status = ENDED.get(row.exit_status, f"failed ({row.exit_status})")
        if self._pool.received and row.exit_status:
            row.status = "interrupted"
        self._halted |= bool(self._pool.received) or row.exit_status == EXIT_INTERRUPTED
        numbers = reported(folder)
        row.take(numbers, self._settings.metric)
        if run.log and folder.is_dir():
            (folder / "logs").mkdir(exist_ok=True)
            run.log = run.log.replace(folder / "logs" / TERMINAL)
        self._source.ended(row)
        self._view.ended(run, varied(row.overrides, self._common))
        self._note(self._source.rows)
        self._check_metric(row, numbers)

    def _check_metric(self, row: Row, numbers: dict[str, float | None]) -> None:
        """Stop the sweep if a run has finished and does not report what runs are compared by."""
        by_default = self._settings.name == "grid" and self._settings.metric == "val_loss"
        if row.done and self._settings.metric not in numbers and not by_default and self.problem is None:
            self.problem = metric_problem(self._settings, sorted(numbers))
            self._pool.stop(signal.SIGTERM)

    def _note(self, rows: list[Row]) -> None:
        write_summary(self._home, rows)
        self._page.write(rows)


def _command(family: str, row: Row, words: list[str]) -> list[str]:
    return [sys.executable, "-m", f"zoo.{family}", *row.overrides, *words, f"run_id={row.run_id}"]
