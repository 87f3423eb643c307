"""An evaluation: which episodes, in which order, by whom, and what came of them."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Optional

from engine.errors import UserError
from engine.policy.conventions import Conventions
from eval import environments, policies, presets
from eval.check import check_conventions
from eval.client import Client
from eval.episode import Job, policy_conventions
from eval.pool import Lost, Pool
from eval.results import LINES, SUMMARY, VIDEOS, Results, key_of, write_json
from eval.server import Background
from eval.settings import EvalSettings, check_eval, shard_of

CHECK, IMAGE = "check.json", "what_the_policy_sees.png"

Report = Callable[[Results, int, int], None]  # of the results so far, episodes of this shard done and planned


@dataclasses.dataclass
class Plan:
    """An evaluation with nothing left open."""

    settings: EvalSettings
    suite: str
    tasks: list[int]
    trials: int
    horizon: int
    seed: int
    resolution: int
    preset: presets.Preset
    benchmark: Conventions

    def jobs(self, folder: Path, done: set[tuple[int, int]]) -> list[Job]:
        """The episodes of this shard that are not done."""
        number, count = shard_of(self.settings.shard)
        return [
            Job(
                task,
                episode,
                self.horizon,
                self.settings.replan,
                self.seed,
                str((folder / VIDEOS / f"task{task}_episode{episode}.mp4").absolute()),
                self.settings.record,
            )
            for task in self.tasks
            for episode in range(self.trials)
            if episode % count == number and (task, episode) not in done
        ]


def plan(settings: EvalSettings) -> Plan:
    """UserError, before anything starts, for what cannot be evaluated."""
    check_eval(settings)
    protocol, suite = presets.benchmark(settings.benchmark), str(settings.suite)
    preset, count = presets.chosen(settings.benchmark, settings.preset), presets.tasks_of(settings.benchmark, suite)
    tasks = sorted(set(settings.tasks)) if settings.tasks else list(range(count))
    if wrong := [task for task in tasks if not 0 <= task < count]:
        raise UserError(f"tasks={wrong[0]}: {suite} has the tasks 0 to {count - 1}")
    trials = settings.trials or preset.trials
    if trials > protocol.INITIAL_STATES:
        raise UserError(
            f"trials={trials}: {settings.benchmark} has {protocol.INITIAL_STATES} initial states of each task"
        )
    resolution = settings.resolution or preset.resolution
    seed = preset.seed if settings.seed is None else settings.seed
    return Plan(
        settings,
        suite,
        tasks,
        trials,
        settings.horizon or preset.horizons[suite],
        seed,
        resolution,
        preset,
        protocol.conventions(preset, resolution),
    )


def header_of(made: Plan, policy: str, conventions: Conventions) -> dict[str, Any]:
    """What must be the same for results to belong together."""
    settings = made.settings
    return json.loads(
        json.dumps(
            {
                "benchmark": settings.benchmark,
                "suite": made.suite,
                "preset": settings.preset,
                "source": made.preset.source,
                "policy": policy,
                "tasks": made.tasks,
                "trials": made.trials,
                "horizon": made.horizon,
                "settle": made.preset.settle,
                "replan": settings.replan or conventions.replan,
                "batch": settings.batch if settings.server is None else None,
                "seed": made.seed,
                "resolution": made.resolution,
                "multisampling": settings.multisampling,
                "convert": settings.convert,
                "conventions": dataclasses.asdict(conventions),
            }
        )
    )


def evaluate(
    settings: EvalSettings,
    folder: Path,
    note: Callable[[str], None] = print,
    report: Report = lambda *_: None,
    policy: Optional[policies.Policy] = None,
) -> dict[str, Any]:
    """Run what is left of an evaluation in `folder`, and give its summary. `policy` stands for `settings.policy`.

    Episodes that finished stay finished, whatever ends the run. UserError for a user's mistakes.
    """
    made = plan(settings)
    if settings.server is None:
        policy = policy or policies.chosen(
            str(settings.policy), made.benchmark, settings.cameras, settings.precision, settings.batch
        )
    python = settings.python or str(environments.python_of(settings.benchmark))
    with ExitStack() as stack:
        address, token = settings.server, settings.token
        if address is None:
            assert policy is not None
            address, token = stack.enter_context(Background(policy)).address, None
        with Client(address, token) as client:
            name = str(client.metadata.get("policy", "unnamed"))
            conventions = policy_conventions(client, made.benchmark)
        check_conventions(conventions, made.benchmark, settings.convert)
        results = Results(folder, header_of(made, name, conventions))
        jobs = made.jobs(folder, set(results.lines))
        planned = len(made.jobs(folder, set()))
        opening = {
            "benchmark": settings.benchmark,
            "server": address,
            "token": token,
            "conventions": dataclasses.asdict(made.benchmark),
            "setup": _setup(made, conventions),
        }
        backend = settings.gl or os.environ.get("MUJOCO_GL") or "egl"
        pool = stack.enter_context(
            Pool(
                python,
                opening,
                folder,
                settings.workers,
                settings.retries,
                settings.stall_s,
                {"MUJOCO_GL": backend},
                note,
            )
        )

        def done(line: dict[str, Any]) -> None:
            results.add(line)
            report(results, planned - len(jobs) + sum(job.key in results.lines for job in jobs), planned)

        try:
            if jobs and settings.check and presets.benchmark(settings.benchmark).DEMONSTRATION:
                replay_demonstration(pool, made, conventions, folder, note)
            if jobs:
                pool.run(jobs, done)
        finally:
            summary = results.close()
    from eval.report import write_report

    write_report(folder)
    return summary


def _setup(made: Plan, policy: Conventions, suite: Optional[str] = None) -> dict[str, Any]:
    wanted = {camera.name for camera in policy.cameras}
    return dataclasses.asdict(
        presets.Setup(
            suite or made.suite,
            {name: sensor for name, sensor in made.preset.cameras.items() if name in wanted},
            made.resolution,
            made.preset.settle,
            made.preset.flip,
            made.settings.multisampling,
        )
    )


def replay_demonstration(
    pool: Pool, made: Plan, policy: Conventions, folder: Path, note: Callable[[str], None]
) -> None:
    """A recorded demonstration must succeed through the adapter. UserError if it does not."""
    started = time.time()
    recorded = json.loads(presets.benchmark(made.settings.benchmark).DEMONSTRATION.read_bytes())
    opening = pool.opening
    pool.opening = opening | {"setup": _setup(made, policy, recorded["suite"])}
    try:
        process = pool.start(0)
        process.send({"do": "replay", **recorded, "image": str((folder / IMAGE).absolute())})
        outcome = process.answer(pool.stall_s)["line"]
        process.kill()
    except Lost as lost:
        raise UserError(f"the simulator does not run: {lost}; {folder}/worker_0.log has more") from None
    finally:
        pool.opening = opening
    write_json(folder / CHECK, outcome | {"suite": recorded["suite"], "task": recorded["task"]})
    if not outcome["success"]:
        raise UserError(
            "a recorded demonstration, told in the policy's conventions, fails in the simulator: the adapter and these "
            "conventions do not fit (check=false goes on all the same)"
        )
    note(f"check: a recorded demonstration succeeds in {outcome['steps']} steps ({time.time() - started:.0f} s)")


__all__ = ["LINES", "SUMMARY", "Plan", "evaluate", "key_of", "plan"]
