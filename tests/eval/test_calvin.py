"""CALVIN without its simulator: sequences and their order, initial states, metric, actions."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import numpy as np
import pytest

from engine.errors import UserError
from eval.calvin import metric, sequences
from eval.calvin.rules import RULES, follows, kind

# SHA-256 of the JSON (with sorted keys) of what the public protocol's own code gives for 1000 sequences.
OFFICIAL = "13bc4fad80a302e6405e5f4f800cc028789a245409cd12df39b783099ad4860f"


def digest(found: list[sequences.Sequence]) -> str:
    text = json.dumps([[scene, list(tasks)] for scene, tasks in found], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_thousand_sequences_are_the_official_ones_in_the_official_order() -> None:
    found = sequences.official()
    assert digest(found) == OFFICIAL
    assert len(found) == 1000 and len({str(scene) for scene, _ in found}) == 192
    counts = Counter(task for _, tasks in found for task in tasks)
    assert (counts["place_in_slider"], counts["open_drawer"], counts["lift_pink_block_drawer"]) == (398, 379, 17)


@pytest.mark.parametrize("number", [0, 101])
def test_they_are_drawn_again_from_the_rules(number: int) -> None:
    scene = sequences.initial_scenes()[number]
    share = 6 if number < 40 else 5  # 1000 over 192 scenes: the first 40 have one more
    kept = Counter(tasks for other, tasks in sequences.official() if other == scene)
    assert Counter(sequences.draw(scene, share, number)) == kept


@pytest.mark.slow
def test_all_are_drawn_again() -> None:
    assert digest(sequences.draw_all()) == OFFICIAL


def test_rules() -> None:
    """34 tasks of 11 kinds; a block behind the door cannot be lifted; stacking needs one block under another."""
    assert len(RULES) == 34 and len({kind(task) for task in RULES}) == 11
    scene = sequences.initial_scenes()[0] | {"red_block": "slider_left", "slider": "left", "blue_block": "table"}
    assert follows(scene, "lift_red_block_slider") is None
    held = follows(scene | {"slider": "right"}, "lift_red_block_slider")
    assert held and (held["red_block"], held["grasped"]) == ("grasped", 1)
    stacked = follows(held | {"pink_block": "slider_right"}, "stack_block")
    assert stacked and (stacked["red_block"], stacked["blue_block"]) == ("stacked_top", "stacked_bottom")
    assert follows(held | {"pink_block": "table"}, "stack_block") is None  # on which of the two is not said


def test_initial_states() -> None:
    """The hash is pyhash's (its documentation's example); the places are the published ones."""
    assert sequences.fnv1("hello world") == 2805756500
    for scene in sequences.initial_scenes():
        robot, state = sequences.initial_state(scene)
        assert robot.shape == (15,) and state.shape == (24,)
        assert state[4] == scene["lightbulb"] and state[5] == scene["led"]
        assert state[0] == (0.28 if scene["slider"] == "left" else 0)
        blocks = state[6:].reshape(3, 6)
        assert len({tuple(block[:3]) for block in blocks}) == 3  # no two in one place
        for name, block in zip(("red_block", "blue_block", "pink_block"), blocks, strict=True):
            assert (block[2] < 0.46) == (scene[name] == "table")
            assert 3 / 8 * np.pi <= block[5] <= 5 / 8 * np.pi and not block[3:5].any()
    again = sequences.initial_state(scene)[1]
    assert np.array_equal(again, state)


def test_metric() -> None:
    """By hand: of five sequences, four have a first success, three a second, two a fifth."""
    results = [5, 0, 2, 1, 5]
    assert metric.in_a_row(results) == [0.8, 0.6, 0.4, 0.4, 0.4]
    assert metric.average_length(results) == pytest.approx(2.6) == sum(metric.in_a_row(results))
    tasks = [("a", "b", "c", "d", "e")] * 5
    assert metric.by_task(results, tasks) == {"a": (4, 5), "b": (3, 4), "c": (2, 3), "d": (2, 2), "e": (2, 2)}
    with pytest.raises(ValueError, match="from 0 to 5"):
        metric.in_a_row([6])
    with pytest.raises(ValueError, match="there must be one"):
        metric.average_length([])


def test_actions() -> None:
    """1 is 0.02 m and 0.05 rad; what is beyond is cut off, and the gripper is one of the two."""
    given = np.array([0.01, -0.02, 0.1, 0.025, -0.05, 0, 0.3])
    assert np.allclose(metric.relative_action(given), [0.5, -1, 1, 0.5, -1, 0, 1])
    assert metric.relative_action(np.zeros(7))[-1] == -1
    assert np.allclose(
        metric.from_relative(np.array([0.5, -1, 1, 0.5, -1, 0, 1])), [0.01, -0.02, 0.02, 0.025, -0.05, 0, 1]
    )
    with pytest.raises(UserError, match="7 numbers"):
        metric.relative_action(np.zeros(8))
