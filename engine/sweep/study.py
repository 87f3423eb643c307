"""`sweep=optuna`: runs whose settings Optuna's TPE sampler draws from what earlier ones came to."""

from __future__ import annotations

import importlib.util
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import UserError
from engine.rundir import hold
from engine.schema import Sweep
from engine.sweep.rows import RUNNING, Row, read_summary, reported, result_of
from engine.sweep.space import Parameter

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

JOURNAL = "study.journal"  # of Optuna: JSON, a line for each thing that happened


def check_package() -> None:
    """UserError if Optuna is not installed. Imports nothing."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError(
            "sweep=optuna needs the package optuna, which is not installed; add it with `uv sync --extra optuna`"
        )


class Search:
    """A study in a sweep's folder. What is drawn depends on the seed and the trials before, however often resumed."""

    def __init__(self, home: Path, runs: Path, settings: Sweep, space: list[Parameter], fixed: list[str]) -> None:
        """`home`: the sweep's folder. `runs`: where run folders are. UserError if another sweep holds the study."""
        home.mkdir(parents=True, exist_ok=True)
        self._lock = hold(home, instead="")
        self._runs, self._settings, self._space, self._fixed = runs, settings, space, fixed
        self.home = home
        self._study = _open(home / JOURNAL, settings.direction)
        self._distributions = {parameter.key: parameter.distribution() for parameter in space}
        self.rows = self._known(read_summary(home))

    @property
    def total(self) -> int:
        """Runs that there will be."""
        return max(self._settings.trials, len(self.rows))

    def close(self) -> None:
        """Let another command have the study."""
        os.close(self._lock)

    def next(self) -> Row | None:
        """The next run; None if there are as many as were asked for."""
        from optuna.samplers import TPESampler

        if len(self.rows) >= self._settings.trials:
            return None
        # A sampler's state is not kept, so each trial has a seed of its own.
        self._study.sampler = TPESampler(seed=zlib.crc32(f"{self._settings.seed}-{len(self.rows)}".encode()))
        trial = self._study.ask(self._distributions)
        self.rows.append(self._row(trial.number, trial.params))
        return self.rows[-1]

    def ended(self, row: Row) -> None:
        """Tell the study what came of a run; one that did not finish with a finite metric has failed."""
        self._tell(self.rows.index(row), row)

    def _tell(self, number: int, row: Row) -> None:
        from optuna.trial import TrialState

        if row.done and row.value is not None:
            self._study.tell(number, row.value)
        else:
            self._study.tell(number, state=TrialState.FAIL)

    def _row(self, number: int, drawn: dict[str, object]) -> Row:
        words = [parameter.word(drawn[parameter.key]) for parameter in self._space if parameter.key in drawn]
        return Row([*self._fixed, *words], str(self._runs / f"{self.home.name}-{number}"))

    def _known(self, kept: list[Row]) -> list[Row]:
        """A row for each trial of a study that is gone on with. What was running when it was left has failed.

        Only if the run itself got to its end, and the sweep alone was ended before it could note it, it counts.
        """
        rows = []
        for trial in self._study.trials:
            row = kept[trial.number] if trial.number < len(kept) else self._row(trial.number, trial.params)
            if row.status in (RUNNING, "not started") or not trial.state.is_finished():
                self._settle(row, trial)
            rows.append(row)
        return rows

    def _settle(self, row: Row, trial: FrozenTrial) -> None:
        folder = Path(row.folder)
        finished = result_of(folder).get("status") == "done"
        if finished:
            row.take(reported(folder), self._settings.metric)
        if row.status in (RUNNING, "not started"):
            row.status = "done" if finished else "failed (killed)"
        if not trial.state.is_finished():
            self._tell(trial.number, row)


def _open(journal: Path, direction: str) -> Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    _mend(journal)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return optuna.create_study(storage=storage, study_name="sweep", direction=direction, load_if_exists=True)


def _mend(journal: Path) -> None:
    """Remove a last line that was cut short, and Optuna's own lock, of a sweep that was killed; its folder is held."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.is_file() and (text := journal.read_bytes()) and not text.endswith(b"\n"):
        journal.write_bytes(text[: text.rfind(b"\n") + 1])
