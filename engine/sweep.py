"""`--multirun`: every combination of the given values, each a run of its own, one after another."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import QuotedString, Transformer, ValueType

from engine.compose import group_options, parse
from engine.errors import EXIT_INTERRUPTED, Stopped, UserError
from engine.family import load_family
from engine.launch.signals import raised
from engine.launch.supervise import signal_at_parents_end
from engine.plan import Plan, plan
from engine.rundir import new_run_id, run_folder

FREE_TEXT = ("prompt", "job.sample_prompt")  # commas belong to the text


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


def sweep(family: str, overrides: list[str], show: bool = False) -> int:
    """Run all combinations; 0 if every run succeeded, else 1. All are checked before the first starts."""
    combinations = expand(overrides, group_options(load_family(family)))
    identity = new_run_id()
    if any(word.startswith("run_id=") for word in overrides):
        raise UserError("run_id: the runs of a sweep name themselves; leave it out with --multirun")
    plans = check(family, combinations, identity)
    if show:
        for combination, planned in zip(combinations, plans, strict=True):
            from engine.freeze import to_yaml

            print(f"# {varied(combination, shared(combinations))}\n{to_yaml(planned.run)}---")
        return 0
    rows = [Row(c, str(run_folder(p.run))) for c, p in zip(combinations, plans, strict=True)]
    home = Path(plans[0].run.output_dir) / family / "sweeps" / identity
    stopped = False
    common = shared(combinations)
    if common:
        print(f"all runs: {' '.join(common)}")
    for number, row in enumerate(rows):
        print(f"run {number + 1} of {len(rows)}: {varied(row.overrides, common)}", flush=True)
        stopped = _run(family, row, f"{identity}-{number}")
        _summarise(home, rows)
        if stopped:
            break
    print_table(rows, home / "summary.json")
    if stopped:
        return row.exit_status or EXIT_INTERRUPTED
    return 0 if all(row.exit_status == 0 for row in rows) else 1


def expand(overrides: list[str], groups: dict[str, list[str]]) -> list[list[str]]:
    """The product of all sweeps among the overrides, the last one varying fastest."""
    choices: list[list[str]] = []
    for word in overrides:
        key = word.partition("=")[0]
        values = None if key in FREE_TEXT else _values(word, groups.get(key, []))
        if values == []:
            raise UserError(f"{word}: there is no value in it; write a list like {key}=1,2 or range(start,stop,step)")
        choices.append([word] if values is None else [f"{key}={value}" for value in values])
    return [list(combination) for combination in itertools.product(*choices)]


def _values(word: str, options: list[str]) -> list[str] | None:
    """The values that an override lists, as they would be typed; None if it names a single one."""
    try:
        override = parse(word)
    except UserError:
        return None  # plain text such as a path; whether it is right is checked with the run
    if not override.is_sweep_override():
        return None
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return override._value.filter(options)  # type: ignore[union-attr]
    if not override.is_discrete_sweep():
        raise UserError(f"{word}: an interval has no end of values; write a list or range(start,stop,step)")
    return list(override.sweep_iterator(_typed))


def _typed(value: Any) -> str:
    """A value as text that means the same again; what was not quoted stays without quotes."""
    return value if isinstance(value, str) and not isinstance(value, QuotedString) else Transformer.str(value)


def check(family: str, combinations: list[list[str]], identity: str) -> list[Plan]:
    """Plan every run. A UserError, each mistake once, if any cannot be."""
    plans: list[Plan] = []
    problems: dict[str, None] = {}
    for number, combination in enumerate(combinations):
        try:
            plans.append(plan(family, [*combination, f"run_id={identity}-{number}"]))
        except UserError as error:
            problems |= dict.fromkeys(str(error).splitlines())
    if problems:
        raise UserError("\n".join(problems))
    return plans


def _run(family: str, row: Row, run_id: str) -> bool:
    """One run in its own process; whether the user stopped it and thereby the sweep."""
    begin = time.monotonic()
    process = subprocess.Popen(_command(family, row, run_id), preexec_fn=_as_a_run)
    stopped = False
    while True:
        try:
            with raised():
                row.exit_status = process.wait()
            break
        except Stopped as stop:
            # The run saves and stops, at the second signal at once; no further run is started.
            stopped = True
            process.send_signal(stop.number)
    row.seconds = round(time.monotonic() - begin, 2)
    result = _result(Path(row.folder))
    ended = {0: "done", EXIT_INTERRUPTED: "interrupted"}.get(row.exit_status, f"failed ({row.exit_status})")
    row.status = "interrupted" if stopped else ended
    row.loss, row.val_loss = result.get("loss"), result.get("val_loss")
    return stopped or row.exit_status == EXIT_INTERRUPTED


def _as_a_run() -> None:
    """In a run's process: signals come from the sweep alone, and if the sweep is killed, the run saves and stops."""
    os.setpgid(0, 0)
    signal_at_parents_end(signal.SIGTERM)


def _command(family: str, row: Row, run_id: str) -> list[str]:
    return [sys.executable, "-m", f"zoo.{family}", *row.overrides, f"run_id={run_id}"]


def _result(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _summarise(home: Path, rows: list[Row]) -> None:
    home.mkdir(parents=True, exist_ok=True)
    temporary = home / "summary.json.tmp"
    temporary.write_text(json.dumps({"runs": [asdict(row) for row in rows]}, indent=1) + "\n")
    temporary.replace(home / "summary.json")


def shared(combinations: list[list[str]]) -> list[str]:
    """The overrides that all runs of a sweep have; none for a single run."""
    first, *others = combinations
    return [word for word in first if all(word in other for other in others)] if others else []


def varied(overrides: list[str], common: list[str]) -> str:
    """What is particular to one run."""
    return " ".join(word for word in overrides if word not in common)


def print_table(rows: list[Row], summary: Path) -> None:
    """The runs, what varied between them first."""
    from rich.console import Console
    from rich.table import Table

    common = shared([row.overrides for row in rows])
    table = Table(title=" ".join(common) or None, title_justify="left")
    for name in ("run", "overrides", "status", "loss", "validation", "seconds", f"in {Path(rows[0].folder).parent}"):
        table.add_column(name, overflow="fold", justify="right" if name in ("run", "seconds") else "left")
    for number, row in enumerate(rows):
        cells = [str(number + 1), varied(row.overrides, common), row.status, _number(row.loss), _number(row.val_loss)]
        folder = Path(row.folder)
        table.add_row(*cells, _number(row.seconds, 1), folder.name if folder.is_dir() else "-")
    # A log has no width; a terminal folds what is too wide for it.
    Console(width=None if sys.stdout.isatty() else 240).print(table)
    print(f"summary: {summary}")


def _number(value: float | None, digits: int = 4) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"
