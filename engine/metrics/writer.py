"""`metrics.jsonl`, and by choice TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.schema import Logger, Run

METRICS = "metrics.jsonl"


def check_packages(logger: Logger) -> None:
    """UserError if the settings ask for a logger whose package is not installed. Imports nothing."""
    for name, wanted in (("tensorboard", logger.tensorboard), ("wandb", logger.wandb)):
        if wanted and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logger.{name}=true needs the package {name}, which is not installed; add it with "
                f"`uv sync --extra {name}`, or leave logger.{name} out (metrics.jsonl is always written)"
            )


class MetricsWriter:
    """Writes every row of metrics as it comes. One process only.

    `start_step` is the step of the checkpoint that the run goes on from, 0 at the beginning: later rows, and a line
    that a kill cut short, are removed first. Numbers that are not finite are written as null, since JSON has no others.
    """

    def __init__(self, run_dir: Path, run: Run, start_step: int = 0) -> None:
        check_packages(run.logger)
        self.path = run_dir / METRICS
        keep_until(self.path, start_step)
        self._file = self.path.open("a")
        self._board = _tensorboard(run_dir, start_step) if run.logger.tensorboard else None
        self._wandb = _wandb(run_dir, run) if run.logger.wandb else None

    def write(self, row: dict[str, Any]) -> None:
        """Append a row that holds at least `step`, and pass it on to the system: a killed process has written it."""
        try:
            self._file.write(json.dumps({k: _finite(v) for k, v in row.items()}) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; checkpoints are whole") from None
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float)) and k != "step"}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, row["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=row["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of a metrics file; lines that are no row, such as a last one cut short, are passed over."""
    if not path.is_file():
        return
    with path.open(errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row


def keep_until(path: Path, step: int) -> None:
    """Remove the rows after `step`; the file is replaced in one move."""
    if not path.is_file():
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step)
    temporary.replace(path)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(run_dir: Path, start_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=start_step + 1)


def _wandb(run_dir: Path, run: Run) -> Any:
    import wandb

    return wandb.init(
        project=run.logger.wandb_project,
        name=f"{run.family}-{run.run_id}",
        id=f"{run.family}-{run.run_id}",
        resume="allow",
        dir=str(run_dir),
        config=asdict(run),
    )
