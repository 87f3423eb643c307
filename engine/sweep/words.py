"""The words of a sweep's command line: which are the sweep's own, and which a resumed study takes up again."""

from __future__ import annotations

import json
from pathlib import Path

from engine.checks import value_problems
from engine.compose import compose, group_options
from engine.errors import UserError
from engine.family import Family
from engine.report.facts import as_typed
from engine.rundir import OVERRIDES
from engine.schema import Run, Sweep
from engine.sweep.expand import override_key, swept
from engine.sweep.space import search_space

OWN = "sweep"
SEARCH_ONLY = ("trials", "seed", "resume")
# What may change while a study goes on: nothing of it changes what a trial comes to.
FREE = ("launcher", "hardware", "logger", "faults", "profile", "debug")


def is_own(word: str) -> bool:
    """Whether an override is the sweep's own, not its runs'."""
    return override_key(word).partition(".")[0] == OWN


def of_runs(words: list[str]) -> list[str]:
    """The overrides of the runs."""
    return [word for word in words if not is_own(word)]


def read(family: Family, words: list[str]) -> Run:
    """A run that has only the sweep's settings, the hardware and the output folder; UserError, one mistake a line."""
    own = [word for word in words if is_own(word)]
    for word in own:
        if swept(word) is not None:
            raise UserError(f"{word}: one value is needed; a sweep's own settings cannot be varied")
    own += [word for word in words if override_key(word) in ("hardware", "output_dir") and swept(word) is None]
    composition = compose(family, own)
    problems = [line for line in value_problems(composition.run, family) if line.startswith("sweep.")]
    if composition.run.sweep.name == "grid":
        named = [f"{OWN}.{key}" for key in SEARCH_ONLY if f"{OWN}.{key}" in composition.named]
        problems += [f"{key} has no effect: only sweep=optuna has it; leave it out" for key in named]
    if problems:
        raise UserError("\n".join(problems))
    return composition.run


def output_dir(family: Family, words: list[str]) -> str:
    """Where the runs' folders are, and the sweep's own."""
    named = [word for word in words if override_key(word) == "output_dir" and swept(word) is None]
    return compose(family, named).run.output_dir


def resumed_home(words: list[str], family: str, output_dir: str) -> Path | None:
    """The folder of the study that `sweep.resume` names, if it does. UserError if there is none."""
    named = [word.partition("=")[2].strip("'\"") for word in words if override_key(word) == f"{OWN}.resume"]
    if not named or named[-1] == "null":
        return None
    sweeps = Path(output_dir) / family / "sweeps"
    places = [Path(named[-1]).expanduser(), sweeps / named[-1]]
    home = next((place for place in places if (place / OVERRIDES).is_file()), None)
    if home is None:
        seen = next((place for place in places if place.is_dir()), None)
        why = f"{seen} holds no study" if seen else f"there is no such folder, nor one in {sweeps}"
        raise UserError(f"sweep.resume={named[-1]}: {why}; name a sweep that sweep=optuna began")
    return as_typed(home.resolve())  # its name is the study's id, also where `.` was typed


def go_on(home: Path, family: Family, words: list[str]) -> list[str]:
    """All words of a resumed study: its own, and those of this command in their place where they may differ.

    Raises UserError for what would make its trials incomparable: another search space, other settings, another metric.
    """
    kept: dict[str, str] = {override_key(word): word for word in kept_words(home)}
    groups = group_options(family)
    space = {parameter.key: parameter for parameter in search_space(of_runs(list(kept.values())), groups)[0]}
    for word in words:
        key = override_key(word)
        before = kept.get(key)
        same = before is not None and before.partition("=")[2] == word.partition("=")[2]
        if swept(word) is not None and not is_own(word):
            same = search_space([word], groups)[0] == [space.get(key)]
        if not same and not _may_change(key):
            had = f"it was begun with {before}" if before else f"it was begun without {key}"
            raise UserError(f"{word}: not the study in {home}, {had}; leave it out, or begin another study")
        if key != f"{OWN}.resume":
            kept[key] = word
    return list(kept.values())


def _may_change(key: str) -> bool:
    group, _, leaf = key.partition(".")
    return leaf in ("slots", "trials", "resume") if group == OWN else group in FREE


def kept_words(home: Path) -> list[str]:
    """The words that a study was begun with."""
    try:
        words = json.loads((home / OVERRIDES).read_text())
    except (OSError, ValueError):
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{home / OVERRIDES}: not readable; a study cannot go on without it")
    return words


def keep_words(home: Path, words: list[str]) -> None:
    """Write them for a resume."""
    temporary = home / f"{OVERRIDES}.tmp"
    temporary.write_text(json.dumps(words, indent=1) + "\n")
    temporary.replace(home / OVERRIDES)


def metric_problem(settings: Sweep, numbers: list[str]) -> str:
    """One line for a metric that a finished run does not report."""
    from engine.suggest import did_you_mean

    near = did_you_mean(settings.metric, numbers)
    known = ", ".join(numbers) or "no number"
    return f"sweep.metric={settings.metric}: the runs report no such number{near}; they report {known}"
