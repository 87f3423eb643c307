"""The runs of a sweep and what came of each: `summary.json`, and the table at the end."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from engine.metrics.writer import METRICS, read_rows
from engine.report.facts import finite
from engine.schema import Sweep

SUMMARY = "summary.json"
RUNNING = "running"


@dataclass
class Row:
    """One run of a sweep and what came of it."""

    overrides: list[str]
    folder: str
    status: str = "not started"
    exit_status: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    seconds: float | None = None
    value: float | None = None  # of the sweep's metric

    @property
    def run_id(self) -> str:
        return Path(self.folder).name

    @property
    def done(self) -> bool:
        return self.status == "done"

    def take(self, numbers: dict[str, float | None], metric: str) -> None:
        """Take over what the run reports of itself."""
        self.loss, self.val_loss, self.value = numbers.get("loss"), numbers.get("val_loss"), numbers.get(metric)


def result_of(folder: Path) -> dict[str, Any]:
    """`result.json`; empty if there is none."""
    try:
        value = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def reported(folder: Path) -> dict[str, float | None]:
    """The last value of each number that a run reports; None where it is not finite."""
    last: dict[str, Any] = {}
    for row in read_rows(folder / METRICS):
        last |= {key: value for key, value in row.items() if value is None or _is_number(value)}
    last |= {key: value for key, value in result_of(folder).items() if key in last or _is_number(value)}
    return {key: finite(value) for key, value in last.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def ranked_by(rows: list[Row], settings: Sweep) -> str:
    """The metric that the runs are compared by: the sweep's own, or the loss if no run was validated."""
    if settings.metric == "val_loss" and settings.name == "grid" and all(row.value is None for row in rows):
        return "loss"
    return settings.metric


def value_of(row: Row, metric: str, settings: Sweep) -> float | None:
    return row.value if metric == settings.metric else row.loss


def ranking(rows: list[Row], settings: Sweep) -> list[int]:
    """Positions of the finished runs that have the metric, the best first."""
    metric, sign = ranked_by(rows, settings), 1 if settings.direction == "minimize" else -1
    known = {n: value_of(row, metric, settings) for n, row in enumerate(rows) if row.done}
    return sorted((n for n, v in known.items() if v is not None), key=lambda n: sign * known[n])  # type: ignore[operator]


def write_summary(home: Path, rows: list[Row]) -> None:
    """Write `summary.json`, in one move."""
    home.mkdir(parents=True, exist_ok=True)
    temporary = home / f"{SUMMARY}.tmp"
    temporary.write_text(json.dumps({"runs": [asdict(row) for row in rows]}, indent=1) + "\n")
    temporary.replace(home / SUMMARY)


def read_summary(home: Path) -> list[Row]:
    """The rows of `summary.json`; none if it is missing or damaged."""
    names = {field.name for field in fields(Row)}
    try:
        runs = json.loads((home / SUMMARY).read_text())["runs"]
        return [Row(**{k: v for k, v in run.items() if k in names}) for run in runs]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def shared(combinations: list[list[str]]) -> list[str]:
    """The overrides that all runs of a sweep have; none for a single run."""
    first, *others = combinations
    return [word for word in first if all(word in other for other in others)] if others else []


def varied(overrides: list[str], common: list[str]) -> str:
    """What is particular to one run."""
    return " ".join(word for word in overrides if word not in common)


def print_table(rows: list[Row], common: list[str], settings: Sweep) -> None:
    """The runs, what varied between them first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=" ".join(common) or None, title_justify="left")
    extra = [] if settings.metric in ("val_loss", "loss") else [settings.metric]
    names = ("run", "overrides", "status", "loss", "validation", *extra, "seconds", f"in {Path(rows[0].folder).parent}")
    for name in names:
        table.add_column(name, overflow="fold", justify="right" if name in ("run", "seconds") else "left")
    for number, row in enumerate(rows):
        cells = [str(number + 1), varied(row.overrides, common), row.status, text(row.loss), text(row.val_loss)]
        cells += [text(row.value)] if extra else []
        folder = Path(row.folder)
        table.add_row(*cells, text(row.seconds, 1), folder.name if folder.is_dir() else "-")
    # A log has no width; a terminal folds what is too wide for it.
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def text(value: float | None, digits: int = 4) -> str:
    """A number for a table."""
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}g}"
