"""CALVIN's numbers and its actions, without its simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import UserError
from eval.calvin.sequences import LENGTH

STEPS = 360  # of a subtask
POSITION, ROTATION = 0.02, 0.05  # metres and radians of a relative action of 1


def in_a_row(results: Sequence[int]) -> list[float]:
    """The share of sequences with at least 1, 2, ... 5 successes from their beginning on."""
    _check(results)
    return [sum(done >= number for done in results) / len(results) for number in range(1, LENGTH + 1)]


def average_length(results: Sequence[int]) -> float:
    """Mean successes of a sequence, at most 5: the sum of `in_a_row`."""
    _check(results)
    return sum(results) / len(results)


def by_task(results: Sequence[int], sequences: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Successes and trials of each task: those done, and the one that ended its sequence."""
    done: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for result, tasks in zip(results, sequences, strict=True):
        done.update(tasks[:result])
        tried.update(tasks[: result + 1])
    return {task: (done[task], tried[task]) for task in tried}


def summary(results: Sequence[int], sequences: Sequence[Sequence[str]]) -> dict[str, Any]:
    """All of it."""
    return {
        "in_a_row": in_a_row(results),
        "average_length": average_length(results),
        "tasks": {task: {"successes": a, "trials": b} for task, (a, b) in sorted(by_task(results, sequences).items())},
    }


def _check(results: Sequence[int]) -> None:
    if not results or any(not 0 <= result <= LENGTH for result in results):
        raise ValueError(f"results must be from 0 to {LENGTH}, and there must be one")


def relative_action(action: np.ndarray) -> np.ndarray:
    """Metres, radians (Euler angles) and a gripper's command (> 0: open) as CALVIN's relative action [7].

    The simulator clips to [-1, 1] and takes the gripper's command only as exactly -1 (close) or 1 (open).
    """
    if np.shape(action) != (7,):
        raise UserError(f"CALVIN takes relative actions of 7 numbers, not of shape {list(np.shape(action))}")
    scaled = np.asarray(action, dtype=np.float64) / np.repeat([POSITION, ROTATION, 1.0], [3, 3, 1])
    return np.append(np.clip(scaled[:6], -1, 1), 1.0 if scaled[6] > 0 else -1.0)


def from_relative(action: np.ndarray) -> np.ndarray:
    """CALVIN's relative action [7] in metres and radians; the gripper as it is."""
    return np.asarray(action, dtype=np.float64) * np.repeat([POSITION, ROTATION, 1.0], [3, 3, 1])
