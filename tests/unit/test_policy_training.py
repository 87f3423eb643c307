"""What a policy takes from its data: statistics to normalise with, conventions, and the errors that it is judged by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.data.lerobot.meta import read_meta
from engine.data.lerobot.request import Request
from engine.data.policy_batch import PolicyBatch
from engine.errors import UserError
from engine.policy import statistics
from engine.policy.conventions import Camera, Conventions, Gripper, Space
from engine.policy.data import chosen
from engine.policy.describe import conventions_of
from engine.policy.judge import action_errors
from engine.schema import Data, Run
from tests.unit.robot_sets import make

VALUES = np.random.default_rng(0).normal(size=(50, 2))
MEASURED = {"action": statistics.statistics([VALUES])}
OTHER = {"action": statistics.statistics([VALUES * 1.1])}


def run_of(weights: Path | None, which: str | None = None) -> Run:
    model: Any = SimpleNamespace(weights=None if weights is None else str(weights))
    return Run(family="pi05", model=model, data=Data(name="lerobot", statistics=which))


def test_a_policy_and_data_that_disagree_stop_unless_it_is_said_what_counts(tmp_path: Path) -> None:
    statistics.save(OTHER, tmp_path)
    message = r"model.weights=.*: action\[\d\]: mean is .* in the dataset's; data.statistics=policy keeps"
    with pytest.raises(UserError, match=message):
        chosen(run_of(tmp_path), MEASURED, None)
    assert chosen(run_of(tmp_path, "dataset"), MEASURED, None) is MEASURED
    np.testing.assert_array_equal(chosen(run_of(tmp_path, "policy"), MEASURED, None)["action"].q99, OTHER["action"].q99)
    np.testing.assert_array_equal(chosen(run_of(tmp_path), OTHER, None)["action"].q01, OTHER["action"].q01)
    (tmp_path / "without").mkdir()
    assert chosen(run_of(tmp_path / "without"), MEASURED, None) is MEASURED
    with pytest.raises(UserError, match=r"data.statistics=policy: model.weights=None brings none"):
        chosen(run_of(None, "policy"), MEASURED, None)
    resumed = chosen(run_of(None), MEASURED, tmp_path / "tokenizer")  # of a checkpoint, which lies beside it
    np.testing.assert_array_equal(resumed["action"].mean, OTHER["action"].mean)


def test_conventions_are_the_recorders_or_what_the_dataset_says(tmp_path: Path) -> None:
    folder = make(tmp_path / "set", lengths=(3,)).folder
    request = Request(4, ("observation.images.wrist", "observation.images.top"))
    found = conventions_of("pi05", [read_meta(folder)], request)
    assert [(c.name, c.height, c.width) for c in found.cameras] == [("wrist", 32, 48), ("top", 48, 64)]
    assert (found.state.names, found.action.names) == (("x", "y", "z"), ("a", "b"))
    assert (found.control, found.fps, found.horizon, found.replan, found.family) == ("unknown", 10, 4, 4, "pi05")
    known = Conventions(
        *("expert", "libero_panda", (Camera("top", 48, 64, flip="rotate180"),)),
        action=Space(("a", "b"), "axis_angle", gripper=Gripper()),
        control="absolute",
    )
    known.save(folder / "meta")
    found = conventions_of("pi05", [read_meta(folder)], request)
    assert found == dataclasses.replace(
        known, family="pi05", horizon=4, replan=4, cameras=(Camera("wrist", 32, 48), known.cameras[0])
    )


def test_errors_of_actions_leave_out_what_does_not_count() -> None:
    given = torch.zeros(3, 2, 2)
    actions = torch.tensor([[[1.0, -2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]], [[9.0, 9.0], [9.0, 9.0]]])
    pad = torch.tensor([[False, False], [False, True], [False, False]])
    batch = PolicyBatch({}, {}, torch.zeros(3, 1), actions, pad, sample_ids=[0, 1, -1])
    assert action_errors([batch, batch], [given, given]).tolist() == [18.0, 24.0, 6.0]  # (1+3+5), (2+4+6), 3 steps
