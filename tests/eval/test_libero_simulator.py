"""LIBERO itself, where it can be installed: the expert, the floor, conversions, videos and demonstrations."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine.data.lerobot.dataset import open_dataset
from engine.errors import UserError
from engine.policy.conventions import Gripper
from eval import environments
from eval.demos.recorder import record
from eval.demos.replay import replay
from eval.demos.settings import DemoSettings, ReplaySettings
from eval.libero import protocol as libero
from eval.policies.libero_expert import Expert
from eval.runner import evaluate
from eval.settings import EvalSettings

BENCHMARK = libero.conventions(libero.PRESETS["openpi"])
DRAW = "import mujoco; c = mujoco.GLContext(64, 64); c.make_current()"


@pytest.fixture(scope="session")
def python() -> str:
    """The environment of LIBERO, built once."""
    try:
        environments.build("libero")
    except UserError as error:
        pytest.skip(f"LIBERO cannot be installed: {error}")
    return str(environments.python_of("libero"))


@pytest.fixture(scope="session")
def backend(python: str) -> str:
    """A GL backend that draws without a screen."""
    for name in ("egl", "osmesa"):
        done = subprocess.run(
            [python, "-c", DRAW], env=os.environ | {"MUJOCO_GL": name}, capture_output=True, timeout=120
        )
        if done.returncode == 0:
            return name
    pytest.skip("no GL backend draws here; install libegl1 libegl-mesa0 libgl1-mesa-dri, or libosmesa6")


def settings(**values: object) -> EvalSettings:
    given = {"suite": "libero_object", "policy": "libero_expert", "tasks": [0, 3], "trials": 5, "resolution": 128}
    return EvalSettings(**given | values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_expert_succeeds_and_doing_nothing_does_not(python: str, tmp_path: Path) -> None:
    """Two tasks of libero_object, through the websocket. Nothing is drawn, which needs no GL backend."""
    expert = evaluate(settings(check=False), tmp_path / "expert")
    assert expert["episodes"] == 10 and expert["successes"] >= 9, expert
    nothing = evaluate(settings(policy="zero", trials=1, horizon=60, check=False), tmp_path / "zero")
    assert nothing["episodes"] == 2 and nothing["successes"] == 0
    assert nothing["reasons"] == {"horizon": 2}


@pytest.mark.slow
def test_an_expert_that_declares_other_numbers_is_converted(python: str, backend: str, tmp_path: Path) -> None:
    """A gripper of the other sign: converted, it still succeeds, and is filmed. The check replays a demonstration."""

    class Other(Expert):
        def _act(self, request):  # type: ignore[no-untyped-def]
            action = super()._act(request)
            action[:, 6] *= -1
            return action

    policy = Other(BENCHMARK, cameras=True)
    action = dataclasses.replace(BENCHMARK.action, gripper=Gripper(open=1, close=-1, binary=False))
    policy.conventions = dataclasses.replace(policy.conventions, action=action)
    values = settings(tasks=[0], trials=1, convert=True, record="all", workers=1, gl=backend)
    summary = evaluate(values, tmp_path, policy=policy)
    assert summary["successes"] == 1
    assert (tmp_path / "what_the_policy_sees.png").is_file() and (tmp_path / "videos/task0_episode0.mp4").is_file()


@pytest.mark.slow
def test_a_recorded_demonstration_reads_and_succeeds_again(python: str, backend: str, tmp_path: Path) -> None:
    """One of libero_object at 128 pixels: two cameras, the conventions of the preset, replayed without drawing."""
    given = {"suite": "libero_object", "tasks": [0], "episodes": 1, "resolution": 128, "workers": 1, "gl": backend}
    summary = record(DemoSettings(**given, output=str(tmp_path / "set")), lambda line: None)  # type: ignore[arg-type]
    assert (summary["episodes"], summary["first_state"]) == (1, 49)
    cameras = ["observation.images.image", "observation.images.wrist_image"]
    with open_dataset(tmp_path / "set", tmp_path / "cache") as dataset:
        assert len(dataset) == summary["frames"] > 50 and list(dataset.meta.cameras) == cameras
        shown = dataset.images([0, len(dataset) - 1], cameras)
        for first, last in shown.values():
            assert first.shape == (128, 128, 3) and first.std() > 20  # something is seen
            assert np.abs(first.astype(int) - last.astype(int)).mean() > 1  # and it moves
        assert set(np.unique(dataset.columns["action"][:, 6])) == {-1.0, 1.0}  # the gripper opens and closes
    declared = json.loads((tmp_path / "set/meta/conventions.json").read_text())
    assert (declared["control"], declared["cameras"][0]["flip"]) == ("delta", "horizontal")
    (line,) = replay(tmp_path / "set", ReplaySettings(workers=1, gl=backend), lambda line: None)
    assert line["success"] and abs(line["steps"] - summary["frames"]) <= 1
