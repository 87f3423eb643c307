"""Statistics of the vectors that a policy reads and gives: what its numbers are normalised with. Free of torch.

They are computed from the values themselves, over all datasets of a run at once: the quantiles of a union are not the
averages of its parts' quantiles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import UserError

VERSION = 1
FILE = "statistics.json"
FIELDS = ("mean", "std", "min", "max", "q01", "q99")
TOLERANCE = 1e-4  # of a dimension's range: statistics that differ by less are the same


@dataclass(frozen=True)
class Statistics:
    """Of one feature of D numbers, each array float64 [D]."""

    mean: np.ndarray
    std: np.ndarray  # of the population (divided by the count)
    min: np.ndarray
    max: np.ndarray
    q01: np.ndarray  # quantiles with linear interpolation between neighbours, as numpy computes them
    q99: np.ndarray
    count: int  # vectors

    @property
    def size(self) -> int:
        """Numbers of the feature."""
        return len(self.mean)


def statistics(parts: Sequence[np.ndarray]) -> Statistics:
    """Of the union of arrays [N, D], exactly: a column at a time, so that memory stays at one column's values.

    Raises ValueError if there is no vector, or they have several sizes.
    """
    sizes = {part.shape[1] for part in parts}
    if len(sizes) != 1 or not sum(len(part) for part in parts):
        raise ValueError(f"statistics need vectors of one size; these have {sorted(sizes)}")
    columns = []
    for column in range(sizes.pop()):
        values = np.concatenate([np.asarray(part[:, column], dtype=np.float64) for part in parts])
        low, high = np.quantile(values, [0.01, 0.99])
        columns.append((values.mean(), values.std(), values.min(), values.max(), low, high))
    return Statistics(*(np.array(part) for part in zip(*columns, strict=True)), sum(len(part) for part in parts))


def save(statistics_of: dict[str, Statistics], folder: Path) -> None:
    """Write `statistics.json`."""
    (folder / FILE).write_text(text(statistics_of))


def text(statistics_of: dict[str, Statistics]) -> str:
    """{version, features: {name: {mean: [...], ..., count}}} as JSON. Floats come back unchanged."""
    features = {
        name: {part: getattr(one, part).tolist() for part in FIELDS} | {"count": one.count}
        for name, one in statistics_of.items()
    }
    return json.dumps({"version": VERSION, "features": features}, indent=1) + "\n"


def load(folder: Path) -> dict[str, Statistics]:
    """The statistics of a policy directory, by feature. UserError if they are missing or not understood."""
    path = folder / FILE
    try:
        return parse(json.loads(path.read_bytes()), str(path))
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no {FILE}; a policy directory that job=train wrote has one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None


def parse(values: Any, where: str) -> dict[str, Statistics]:
    """Statistics from decoded JSON; `where` names their origin in a UserError."""
    if not isinstance(values, dict) or values.get("version") != VERSION:
        raise UserError(f"{where}: not statistics of version {VERSION}")
    try:
        return {name: _feature(feature, f"{where}: {name}") for name, feature in values["features"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: not understood ({error!r})") from None


def _feature(values: dict[str, Any], where: str) -> Statistics:
    arrays = [np.array(values[part], dtype=np.float64) for part in FIELDS]
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise UserError(f"{where}: {', '.join(FIELDS)} must be lists of one length")
    if not all(np.isfinite(array).all() for array in arrays):
        raise UserError(f"{where}: holds a number that is not finite")
    return Statistics(*arrays, int(values["count"]))


def differences(policy: dict[str, Statistics], dataset: dict[str, Statistics]) -> Iterator[str]:
    """Where a policy normalises otherwise than a dataset's numbers ask for, one a line."""
    for name in sorted(policy.keys() - dataset.keys()):
        yield f"{name}: the policy normalises it, and the dataset has no such feature"
    for name in sorted(policy.keys() & dataset.keys()):
        mine, theirs = policy[name], dataset[name]
        if mine.size != theirs.size:
            yield f"{name}: {mine.size} numbers in the policy's statistics, {theirs.size} in the dataset's"
            continue
        scale = np.maximum(np.maximum(mine.max - mine.min, theirs.max - theirs.min), 1e-12)
        for part in FIELDS:
            off = np.abs(getattr(mine, part) - getattr(theirs, part)) / scale
            if off.max() > TOLERANCE:
                at = int(off.argmax())
                a, b = getattr(mine, part)[at], getattr(theirs, part)[at]
                yield f"{name}[{at}]: {part} is {a:.6g} in the policy's statistics, {b:.6g} in the dataset's"
                break


def check(policy: dict[str, Statistics], dataset: dict[str, Statistics], where: str) -> None:
    """Raise UserError, one line for each feature, if a policy and a dataset disagree on normalisation."""
    if found := list(differences(policy, dataset)):
        ways = "data.statistics=policy keeps the policy's, data.statistics=dataset takes the dataset's"
        raise UserError("\n".join(f"{where}: {line}; {ways}" for line in found))
