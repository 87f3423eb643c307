"""`state.json` of a checkpoint: how far the run was. Read as untrusted input, free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.index import STATE, read_json
from engine.checkpoint.paths import STEP
from engine.errors import UserError

COUNTS = ("step", "tokens", "optimizer_step")
LOSSES = ("best_val_loss", "val_loss")


@dataclass(frozen=True)
class TrainState:
    """What a training run goes on with."""

    step: int
    tokens: int
    optimizer_step: int
    best_val_loss: float | None
    data: dict[str, Any]
    everything: dict[str, Any]  # the whole file, for parts of the loop that keep something there


def load_train_state(folder: Path) -> TrainState:
    """The checked state of a checkpoint folder. UserError, in one line, for all that is wrong with it."""
    path = folder / STATE
    values = read_json(path)
    if "optimizer_step" not in values and "from" in values:
        raise UserError(
            f"{folder}: holds weights alone and no training to go on with; model.weights={folder} takes them"
        )
    problems = [*_problems(values), *_place(folder, values.get("step"))]
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}; it is damaged, so resume from another checkpoint")
    counts = (values[key] for key in COUNTS)
    return TrainState(*counts, values.get("best_val_loss"), values["data"], values)


def _problems(values: dict[str, Any]) -> list[str]:
    wrong = [
        f"{key} is {values.get(key)!r} and should be a whole number of at least 0"
        for key in COUNTS
        if not _is_count(values.get(key))
    ]
    wrong += [
        f"{key} is {values[key]!r} and should be a number or null"
        for key in LOSSES
        if not (values.get(key) is None or type(values[key]) in (int, float))
    ]
    data = values.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("identity"), dict):
        return [*wrong, f"data is {_short(data)} and should say where in the data the run was"]
    return wrong + [
        f"data.{key} is {data[key]!r} and should be a whole number of at least 0"
        for key in ("version", "row", "window", "epoch", "position", "offset")
        if key in data and not _is_count(data[key])
    ]


def _place(folder: Path, step: Any) -> list[str]:
    named = STEP.fullmatch(folder.name)
    if not named or not _is_count(step) or int(named[1]) == step:
        return []
    return [f"step is {step}, and its folder is {folder.name}"]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
