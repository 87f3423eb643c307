"""LIBERO's protocols and conventions, without the simulator."""

from __future__ import annotations

import dataclasses

import pytest

from engine.errors import UserError
from engine.policy.conventions import Conventions, Gripper
from eval import presets
from eval.check import check_conventions
from eval.libero import protocol as libero
from eval.policies.libero_expert import Expert

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
