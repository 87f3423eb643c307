"""The main side: which episodes are recorded, what is kept of them until all are there, and the dataset at the end."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Conventions
from eval import environments, presets
from eval.demos import lerobot
from eval.demos.act import ACTION, IMAGES, STATE, Recording
from eval.demos.lerobot import Recorded
from eval.demos.settings import DemoSettings, check, check_packages
from eval.pool import Pool
from eval.results import Results, check_same

STAGE, NOTES, EPISODE = "recording", "meta/recording.json", "episode.json"
Report = Callable[[int, int], None]  # episodes recorded so far, and wanted
Key = tuple[int, int]  # task, initial state


@dataclasses.dataclass(frozen=True)
class Plan:
    """A dataset with nothing left open."""

    settings: DemoSettings
    suite: str
    tasks: list[int]
    states: int  # initial ones of each task
    horizon: int
    seed: int
    preset: presets.Preset
    expert: str
    benchmark: Conventions

    @property
    def wanted(self) -> int:
        """Episodes of the whole dataset."""
        return len(self.tasks) * self.settings.episodes

    def missing(self, lines: dict[Key, dict[str, Any]]) -> list[Key]:
        """What to try next: of each task as many further initial states as it lacks successes.

        States are taken from the last one backwards, so that the first are left to be evaluated on.
        """
        found: list[Key] = []
        for task in self.tasks:
            lacks = self.settings.episodes - sum(line["success"] for (of, _), line in lines.items() if of == task)
            untried = [(task, n) for n in reversed(range(self.states)) if (task, n) not in lines]
            found += untried[:lacks]
        return found


def plan(settings: DemoSettings) -> Plan:
    """UserError, before anything starts, for what cannot be recorded."""
    check(settings)
    protocol, suite = presets.benchmark(settings.benchmark), str(settings.suite)
    preset = presets.chosen(settings.benchmark, settings.preset)
    count = presets.tasks_of(settings.benchmark, suite)
    return Plan(
        settings,
        suite,
        sorted(set(settings.tasks)) if settings.tasks else list(range(count)),
        protocol.INITIAL_STATES,
        settings.horizon or preset.horizons[suite],
        preset.seed if settings.seed is None else settings.seed,
        preset,
        protocol.EXPERT,
        protocol.conventions(preset, settings.resolution),
    )


def header_of(made: Plan) -> dict[str, Any]:
    """What must be the same for episodes to belong into one dataset."""
    settings = made.settings
    values = {
        **{"benchmark": settings.benchmark, "suite": made.suite, "preset": settings.preset, "tasks": made.tasks},
        **{"trials": settings.episodes, "horizon": made.horizon, "seed": made.seed, "policy": made.expert},
        **{"settle": made.preset.settle, "multisampling": settings.multisampling},
        "conventions": dataclasses.asdict(made.benchmark),
    }
    return json.loads(json.dumps(values))


def record(
    settings: DemoSettings, note: Callable[[str], None] = print, report: Report = lambda *_: None
) -> dict[str, Any]:
    """Record what is left of a dataset, and write it; what it is. UserError for a user's mistakes.

    An episode that was recorded stays, whatever ends the run: the same settings go on with the others.
    """
    check_packages()
    made, folder = plan(settings), Path(str(settings.output)).expanduser()
    header, stage = header_of(made), folder / STAGE
    if (folder / lerobot.INFO).exists():
        _check_written(folder, header)
        shutil.rmtree(stage, ignore_errors=True)  # the last run ended before it could
        return _summary(folder)
    python = settings.python or str(environments.python_of(settings.benchmark))
    if folder.is_dir() and not stage.is_dir() and any(folder.iterdir()):
        raise UserError(f"output={folder}: it holds something else; name a new folder")
    results = Results(stage, header)
    for torn in {path for path in stage.iterdir() if path.is_dir()} - {_place(stage, key) for key in results.lines}:
        shutil.rmtree(torn)  # an episode that was being written when the last run ended
    try:
        with closing(results):
            _play(python, made, stage, results, note, report)
    except UserError:
        if not results.lines:  # nothing came of it
            shutil.rmtree(stage)
            with suppress(OSError):
                folder.rmdir()
        raise
    good = sorted((key for key, line in results.lines.items() if line["success"]), key=lambda key: (key[0], -key[1]))
    if not good:
        raise UserError(f"{made.expert} succeeded in none of {len(results.lines)} episodes; there is no dataset")
    _tell_missing(made, results.lines, note)
    notes = header | {"episodes": [{"task": task, "state": state} for task, state in good]}
    notes["tried"] = len(results.lines)
    lerobot.write(folder, [_load(stage, key) for key in good], made.benchmark, notes)
    shutil.rmtree(stage)
    return _summary(folder)


def _play(python: str, made: Plan, stage: Path, results: Results, note: Callable[[str], None], report: Report) -> None:
    """Round after round: each tries as many further states as successes are missing."""

    def count() -> int:
        return sum(line["success"] for line in results.lines.values())

    def done(line: dict[str, Any]) -> None:
        _keep(stage, line, made.benchmark.fps)
        results.add(line)
        if not line["success"]:
            place = f"task {line['task']}, state {line['episode']}"
            note(f"{place}: not recorded ({line['reason']}); another takes its place")
        report(count(), made.wanted)

    report(count(), made.wanted)
    with _pool(python, made, stage, note) as pool:
        while keys := made.missing(results.lines):
            pool.run([_job(made, stage, key) for key in keys], done)


def _pool(python: str, made: Plan, stage: Path, note: Callable[[str], None]) -> Pool:
    settings = made.settings
    setup = presets.Setup(
        made.suite,
        made.preset.cameras,
        made.benchmark.cameras[0].height,
        made.preset.settle,
        made.preset.flip,
        settings.multisampling,
    )
    opening = {
        "benchmark": settings.benchmark,
        "server": None,
        "conventions": dataclasses.asdict(made.benchmark),
        "setup": dataclasses.asdict(setup),
    }
    backend = settings.gl or os.environ.get("MUJOCO_GL") or "egl"
    return Pool(
        python,
        opening,
        stage,
        settings.workers,
        settings.retries,
        settings.stall_s,
        {"MUJOCO_GL": backend},
        note,
        do="record",
    )


def _place(stage: Path, key: Key) -> Path:
    return stage / f"task{key[0]}_state{key[1]}"


def _job(made: Plan, stage: Path, key: Key) -> Recording:
    file = _place(stage, key).with_suffix(".npz").absolute()
    return Recording(*key, made.horizon, made.seed, made.expert, str(file))


def _keep(stage: Path, line: dict[str, Any], fps: float) -> None:
    """What the worker sent, as videos and numbers."""
    if not line["success"]:
        return
    place = _place(stage, (line["task"], line["episode"]))
    sent = place.with_suffix(".npz")
    place.mkdir(exist_ok=True)
    told: dict[str, Any] = {"prompt": line["prompt"], "pixels": {}}
    with np.load(sent, allow_pickle=False) as arrays:
        for name in arrays.files:
            if name.startswith(IMAGES):
                camera, frames = name.removeprefix(IMAGES), arrays[name]
                lerobot.encode(place / f"{camera}.mp4", frames, fps)
                told["pixels"][camera] = lerobot.pixel_sums(frames)
        np.savez(place / "numbers.npz", **{name: arrays[name] for name in (STATE, ACTION)})
    (place / EPISODE).write_text(json.dumps(told))
    sent.unlink()


def _load(stage: Path, key: Key) -> Recorded:
    place = _place(stage, key)
    told = json.loads((place / EPISODE).read_text())
    with np.load(place / "numbers.npz", allow_pickle=False) as arrays:
        numbers = {name: arrays[name] for name in (STATE, ACTION)}
    videos = {camera: place / f"{camera}.mp4" for camera in told["pixels"]}
    return Recorded(told["prompt"], numbers, videos, told["pixels"])


def _tell_missing(made: Plan, lines: dict[Key, dict[str, Any]], note: Callable[[str], None]) -> None:
    for task in made.tasks:
        got = sum(line["success"] for (of, _), line in lines.items() if of == task)
        if got < made.settings.episodes:
            note(
                f"task {task}: {got} of {made.settings.episodes} episodes; all {made.states} initial states were tried"
            )


def _check_written(folder: Path, header: dict[str, Any]) -> None:
    try:
        there = json.loads((folder / NOTES).read_bytes())
    except (OSError, ValueError):
        raise UserError(
            f"output={folder}: it holds a dataset that `zoo demos` did not write; name a new folder"
        ) from None
    check_same({key: there.get(key) for key in header}, header, folder)


def _summary(folder: Path) -> dict[str, Any]:
    info, notes = (json.loads((folder / name).read_bytes()) for name in (lerobot.INFO, NOTES))
    kept = ("benchmark", "suite", "tasks", "tried")
    return {
        "folder": str(folder),
        **{key: notes[key] for key in kept},
        "episodes": info["total_episodes"],
        "frames": info["total_frames"],
        "first_state": min(episode["state"] for episode in notes["episodes"]),
    }
