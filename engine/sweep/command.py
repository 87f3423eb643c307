"""`--multirun`: from its command line to the table at its end."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from engine.cli import command_line, program
from engine.compose import group_options
from engine.errors import UserError
from engine.family import load_family
from engine.plan import Plan, hardware_of
from engine.rundir import new_run_id, run_folder
from engine.schema import Run, Sweep
from engine.sweep import words as own
from engine.sweep.check import check, check_space
from engine.sweep.drive import Drive, Grid, Source
from engine.sweep.expand import expand, override_key, swept
from engine.sweep.rows import Row, print_table, ranked_by, ranking, shared, text, value_of, varied
from engine.sweep.slots import Slots, divide
from engine.sweep.space import search_space
from engine.sweep.study import Search, check_package
from hardware.base import Hardware, HardwareError


@dataclass(frozen=True)
class Sweeping:
    """A sweep that is checked and can begin."""

    family: str
    home: Path
    settings: Sweep
    common: list[str]  # overrides of all runs
    slots: Slots


def sweep(family: str, overrides: list[str], show: bool = False) -> int:
    """Run all combinations, or search; 0 if every run succeeded, else 1. All is checked before the first starts."""
    if any(override_key(word) == "run_id" for word in overrides):
        raise UserError("run_id: the runs of a sweep name themselves; leave it out with --multirun")
    card = load_family(family)
    output_dir = own.output_dir(card, overrides)
    resumed = own.resumed_home(overrides, family, output_dir)
    words = own.go_on(resumed, card, overrides) if resumed else overrides
    first = own.read(card, words)
    begin = _search if first.sweep.name == "optuna" else _grid
    return begin(family, words, first, resumed, show)


def _grid(family: str, words: list[str], first: Run, resumed: Path | None, show: bool) -> int:
    combinations = expand(own.of_runs(words), group_options(load_family(family)))
    identity, common = new_run_id(), shared(combinations)
    slots, plans = divide(
        first.sweep.slots, len(combinations), _hardware(first, words), lambda: check(family, combinations, identity)
    )
    if show:
        return _show(plans, [varied(combination, common) for combination in combinations])
    rows = [Row(c, str(run_folder(p.run))) for c, p in zip(combinations, plans, strict=True)]
    home = Path(plans[0].run.output_dir) / family / "sweeps" / identity
    return _run(Sweeping(family, home, first.sweep, common, slots), Grid(rows))


def _search(family: str, words: list[str], first: Run, resumed: Path | None, show: bool) -> int:
    check_package()
    space, fixed = search_space(own.of_runs(words), group_options(load_family(family)))
    if not space:
        raise UserError("sweep=optuna has nothing to vary; name an interval or a list, 'optim.lr=interval(1e-4,1e-2)'")
    identity = resumed.name if resumed else new_run_id()
    slots, plans = divide(
        first.sweep.slots, first.sweep.trials, _hardware(first, words), lambda: check_space(family, space, fixed)
    )
    if any(planned.run.launcher.name == "print" for planned in plans):
        raise UserError("launcher=print starts no run that sweep=optuna could learn from; leave one of them out")
    if show:
        return _show(plans[:1], ["the first value of each"])
    home = resumed or Path(first.output_dir) / family / "sweeps" / identity
    source = Search(home, Path(first.output_dir) / family, first.sweep, space, fixed)
    try:
        own.keep_words(home, words)
        if resumed:
            _say_resumed(source, first.sweep)
        return _run(Sweeping(family, home, first.sweep, fixed, slots), source)
    finally:
        source.close()


def _say_resumed(source: Search, settings: Sweep) -> None:
    there, failed = len(source.rows), sum(not row.done for row in source.rows)
    left = max(0, settings.trials - there)
    print(f"study {source.home}: {there} trials so far, {failed} of them failed; {left} to go")
    if not left:
        print(f"sweep.trials={2 * settings.trials} would go on")


def _hardware(first: Run, words: list[str]) -> Hardware | None:
    """The plugin of all runs; None if they differ."""
    if any(override_key(word) == "hardware" and swept(word) is not None for word in words):
        return None
    try:
        return hardware_of(first)
    except HardwareError as error:
        raise UserError(str(error)) from None


def _show(plans: list[Plan], labels: list[str]) -> int:
    from engine.freeze import to_yaml

    for planned, label in zip(plans, labels, strict=True):
        print(f"# {label}\n{to_yaml(planned.run)}---")
    return 0


def _run(sweeping: Sweeping, source: Source) -> int:
    """Start the runs, wait for them, and say which was the best."""
    if sweeping.common:
        print(f"all runs: {' '.join(sweeping.common)}")
    drive = Drive(sweeping.family, sweeping.home, sweeping.settings, sweeping.common, sweeping.slots, source)
    status = drive.run()
    rows = source.rows
    if rows:
        print_table(rows, sweeping.common, sweeping.settings)
        print(f"summary: {drive.summary}\nreport: {drive.report}")
        _say_best(sweeping, rows)
    if drive.problem:
        raise UserError(drive.problem)
    if drive.stopped and sweeping.settings.name == "optuna":
        again = shlex.join([*program(sweeping.family), "--multirun", f"sweep.resume={sweeping.home}"])
        print(f"continue with: {again}", flush=True)
    return status


def _say_best(sweeping: Sweeping, rows: list[Row]) -> None:
    order, settings = ranking(rows, sweeping.settings), sweeping.settings
    if not order:
        return
    best, metric = rows[order[0]], ranked_by(rows, settings)
    label = varied(best.overrides, sweeping.common) or "the only one"
    print(f"best: run {order[0] + 1} ({label}), {metric} {text(value_of(best, metric, settings))}")
    print(f"repeat it with: {command_line(sweeping.family, best.overrides)}", flush=True)
