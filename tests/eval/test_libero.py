"""LIBERO: its conventions, and the simulator itself where it can be installed."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from engine.errors import UserError
from engine.policy.conventions import Conventions, Gripper
from eval import environments, presets
from eval.check import check_conventions
from eval.libero import protocol as libero
from eval.policies.libero_expert import Expert
from eval.runner import evaluate
from eval.settings import EvalSettings

BENCHMARK = libero.conventions(libero.PRESETS["openpi"])


def test_published_protocols() -> None:
    """Horizons and trials of openpi's example, of lerobot 0.6 and of Isaac-GR00T."""
    openpi, lerobot = presets.chosen("libero", "openpi"), presets.chosen("libero", "lerobot")
    assert [openpi.horizons[suite] for suite in libero.SUITES] == [220, 280, 300, 520, 400]
    assert [lerobot.horizons[suite] for suite in libero.SUITES] == [280, 280, 300, 520, 400]
    assert (openpi.trials, openpi.replan, openpi.seed, openpi.settle) == (50, 5, 7, 10)
    assert presets.chosen("libero", "groot").horizons["libero_goal"] == 720


def declared(**values: object) -> Conventions:
    return dataclasses.replace(Expert(BENCHMARK, cameras=True).conventions, **values)  # type: ignore[arg-type]


WRONG = [
    (
        {"cameras": tuple(dataclasses.replace(camera, flip="none") for camera in BENCHMARK.cameras[:1])},
        "camera image: the policy knows images flipped 'none', and the benchmark's protocol gives 'horizontal'",
        True,
    ),
    (
        {"action": dataclasses.replace(BENCHMARK.action, gripper=Gripper(open=1, close=-1))},
        "action: the policy's gripper opens at 1 and closes at -1, and the benchmark's opens at -1 and closes at 1",
        True,
    ),
    (
        {"action": dataclasses.replace(BENCHMARK.action, rotation="euler_xyz")},
        "action: the policy's rotation is euler_xyz, and the benchmark's is axis_angle",
        True,
    ),
    ({"control": "absolute"}, "control: the policy gives absolute actions, the benchmark takes delta ones", False),
    (
        {"action": dataclasses.replace(BENCHMARK.action, rotation="joints")},
        "action: a rotation given as joints cannot be converted to axis_angle",
        False,
    ),
]


@pytest.mark.parametrize("wrong, words, has_conversion", WRONG)
def test_wrong_conventions(wrong: dict, words: str, has_conversion: bool) -> None:
    """The expert through each of them is refused, unless it may be and is asked to be converted."""
    policy = declared(**wrong)
    with pytest.raises(UserError) as caught:
        check_conventions(policy, BENCHMARK, convert=False)
    assert words in str(caught.value)
    if has_conversion:
        check_conventions(policy, BENCHMARK, convert=True)
    else:
        with pytest.raises(UserError, match=words):
            check_conventions(policy, BENCHMARK, convert=True)
    check_conventions(declared(), BENCHMARK, convert=False)


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
        done = subprocess.run([python, "-c", DRAW], env={"MUJOCO_GL": name}, capture_output=True, timeout=120)
        if done.returncode == 0:
            return name
    pytest.skip("no GL backend draws here; install libegl1 libegl-mesa0 libgl1-mesa-dri, or libosmesa6")


def settings(**values: object) -> EvalSettings:
    given = {"suite": "libero_object", "policy": "libero_expert", "tasks": [0, 3], "trials": 5, "resolution": 128}
    return EvalSettings(**given | values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_expert_succeeds_and_doing_nothing_does_not(python: str, tmp_path: Path) -> None:
    """Two tasks of libero_object, through the websocket. Nothing is drawn, which needs no GL backend."""
    expert = evaluate(settings(), tmp_path / "expert")
    assert expert["episodes"] == 10 and expert["successes"] >= 9, expert
    nothing = evaluate(settings(policy="zero", trials=2, horizon=60, check=False), tmp_path / "zero")
    assert nothing["episodes"] == 4 and nothing["successes"] == 0
    assert nothing["reasons"] == {"horizon": 4}


@pytest.mark.slow
def test_an_expert_that_declares_other_numbers_is_converted(python: str, backend: str, tmp_path: Path) -> None:
    """A gripper of the other sign: converted, it still succeeds, and is filmed."""

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
