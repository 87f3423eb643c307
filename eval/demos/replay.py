"""The recorded actions of a dataset carried out again, open loop: whoever learns from them learns what succeeds."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import UserError
from engine.policy import conventions
from eval import environments, presets
from eval.demos.lerobot import EPISODES, INFO
from eval.demos.recorder import NOTES, Report
from eval.demos.settings import ReplaySettings, check_packages, check_replay
from eval.pool import Pool


@dataclasses.dataclass(frozen=True)
class Again:
    """An episode's actions [T, A], as they lie in the dataset."""

    task: int
    episode: int
    seed: int
    actions: list[list[float]]
    image: None = None


def replay(
    folder: Path,
    settings: ReplaySettings,
    note: Callable[[str], None] = print,
    report: Report = lambda *_: None,
) -> list[dict[str, Any]]:
    """Which episodes succeed again: a line for each, `task`, `episode` (the initial state), `success` and `steps`.

    Nothing is drawn. UserError for a folder that `zoo demos` did not write.
    """
    check_packages()
    check_replay(settings)
    try:
        notes = json.loads((folder / NOTES).read_bytes())
        info = json.loads((folder / INFO).read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{folder}: it is no dataset of `zoo demos`, which has {NOTES}") from None
    jobs = [
        Again(episode["task"], episode["state"], notes["seed"], actions)
        for episode, actions in zip(notes["episodes"], _actions(folder, info), strict=True)
    ][: settings.episodes]
    benchmark = conventions.load(folder / "meta")
    opening = {
        "benchmark": notes["benchmark"],
        "server": None,
        "conventions": dataclasses.asdict(benchmark),
        "setup": dataclasses.asdict(presets.Setup(notes["suite"], settle=notes["settle"])),
    }
    lines: list[dict[str, Any]] = []

    def done(line: dict[str, Any]) -> None:
        lines.append(line)
        report(len(lines), len(jobs))

    backend = settings.gl or os.environ.get("MUJOCO_GL") or "egl"
    python = settings.python or str(environments.python_of(notes["benchmark"]))
    with (
        tempfile.TemporaryDirectory(prefix="zooforge-") as logs,
        Pool(
            python,
            opening,
            Path(logs),
            settings.workers,
            settings.retries,
            settings.stall_s,
            {"MUJOCO_GL": backend},
            note,
            do="replay",
        ) as pool,
    ):
        pool.run(jobs, done)
    return sorted(lines, key=lambda line: (line["task"], -line["episode"]))


def _actions(folder: Path, info: dict[str, Any]) -> list[list[list[float]]]:
    import pyarrow.parquet as pq

    ends = pq.read_table(folder / EPISODES, columns=["dataset_from_index", "dataset_to_index"]).to_pylist()
    path = info["data_path"].format(chunk_index=0, file_index=0)
    actions = np.array(pq.read_table(folder / path, columns=["action"])["action"].to_pylist(), np.float64)
    return [actions[row["dataset_from_index"] : row["dataset_to_index"]].tolist() for row in ends]
