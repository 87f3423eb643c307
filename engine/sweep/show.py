"""What the terminal shows while several runs go on: a table that stays in place, or one line for each event."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from engine.metrics.text import duration
from engine.metrics.writer import METRICS
from engine.sweep.pool import Running
from engine.sweep.rows import Row, text

LINES_EVERY_S = 30.0
TABLE_EVERY_S = 0.5
TAIL = 8192  # bytes that hold the last row of metrics


class View(Protocol):
    """One way of showing a sweep. Runs are counted from 1; `total` is how many there will be."""

    def started(self, run: Running, label: str, total: int) -> None: ...

    def tick(self, running: list[Running]) -> None: ...

    def ended(self, run: Running, label: str) -> None: ...

    def close(self) -> None: ...


class Single:
    """One run at a time has the terminal itself; only what begins is said."""

    def started(self, run: Running, label: str, total: int) -> None:
        print(f"run {run.number + 1} of {total}: {label}", flush=True)

    def tick(self, running: list[Running]) -> None:
        pass

    def ended(self, run: Running, label: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """A line when a run starts or ends, and now and then where it is."""

    def __init__(self) -> None:
        self._said: dict[int, float] = {}  # run and when it was last spoken of
        self._step: dict[int, int] = {}

    def started(self, run: Running, label: str, total: int) -> None:
        self._said[run.number] = time.monotonic()
        self._line(f"run {run.number + 1} of {total} started: {label} (log: {run.log})")

    def tick(self, running: list[Running]) -> None:
        now = time.monotonic()
        for run in running:
            if now - self._said.get(run.number, now) < LINES_EVERY_S:
                continue
            self._said[run.number] = now
            row = last_row(Path(run.row.folder))
            if row and row["step"] != self._step.get(run.number):
                self._step[run.number] = row["step"]
                self._line(f"run {run.number + 1}: step {row['step']}, loss {text(row['loss'])}")

    def ended(self, run: Running, label: str) -> None:
        self._line(f"run {run.number + 1} {outcome(run)}")

    def _line(self, words: str) -> None:
        print(words, flush=True)

    def close(self) -> None:
        pass


class Table:
    """The running runs in place, on a terminal; what has ended scrolls above."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._labels: dict[int, str] = {}
        self._at = 0.0
        self._total = 0

    def started(self, run: Running, label: str, total: int) -> None:
        self._labels[run.number], self._total, self._at = label, total, 0.0

    def tick(self, running: list[Running]) -> None:
        now = time.monotonic()
        if now - self._at >= TABLE_EVERY_S:
            self._at = now
            self._live.update(self._render(running, now), refresh=True)

    def _render(self, running: list[Running], now: float) -> Any:
        from rich.table import Table as RichTable

        table = RichTable(box=None, pad_edge=False, title=None)
        for name in (f"run of {self._total}", "overrides", "step", "loss", "time"):
            table.add_column(name, no_wrap=True, overflow="ellipsis", header_style="dim")
        for run in running:
            row = last_row(Path(run.row.folder)) or {}
            cells = [str(run.number + 1), self._labels.get(run.number, ""), str(row.get("step", "-"))]
            table.add_row(*cells, text(row.get("loss")), duration(now - run.begin))
        return table

    def ended(self, run: Running, label: str) -> None:
        self._at = 0.0
        self._console.print(f"run {run.number + 1} ({label}) {outcome(run)}", markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def view_of(slots: int) -> View:
    """The view for so many runs at a time."""
    if slots == 1:
        return Single()
    return Table() if sys.stdout.isatty() else Lines()


def outcome(run: Running) -> str:
    """How a run ended, in words; for one that failed with the last it said."""
    row: Row = run.row
    losses = {"loss": row.loss, "validation loss": row.val_loss}
    figures = ", ".join(f"{name} {text(value)}" for name, value in losses.items() if value is not None)
    ended = f"{row.status} in {duration(row.seconds)}" + (f": {figures}" if figures else "")
    said = last_line(run.log) if run.log and row.exit_status else ""
    return f"{ended}: {said} (log: {run.log})" if said else ended


def last_row(folder: Path) -> dict[str, Any] | None:
    """The last row of metrics that has a loss, as far as it is written."""
    for line in reversed(_tail(folder / METRICS).splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and "loss" in row:
            return row
    return None


def last_line(path: Path) -> str:
    """The last line that says anything."""
    return next((line.strip() for line in reversed(_tail(path).splitlines()) if line.strip()), "")


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
