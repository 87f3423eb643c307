"""LeRobot's own library on the same folders: its writer's datasets give the samples that its reader gives."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.data.lerobot.dataset import open_dataset
from engine.policy.statistics import statistics
from tests.unit.robot_sets import CAMERAS, make

pytestmark = pytest.mark.slow  # importing lerobot takes long

LENGTHS = (7, 5, 13, 6)
HORIZON = 4


@pytest.fixture(scope="module", autouse=True)
def offline() -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lerobot.datasets.lerobot_dataset")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By lerobot: two cameras, B-frames, several episodes in each file."""
    from lerobot.configs import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    folder, random = tmp_path_factory.mktemp("lerobot") / "set", np.random.default_rng(0)
    features = {
        camera: {"dtype": "video", "shape": (*size, 3), "names": list("hwc")} for camera, size in CAMERAS.items()
    }
    features["observation.state"] = {"dtype": "float32", "shape": (3,), "names": list("xyz")}
    features["action"] = {"dtype": "float32", "shape": (2,), "names": list("ab")}
    encoder = RGBEncoderConfig(vcodec="h264", g=5, extra_options={"bf": 2})
    made = LeRobotDataset.create("own/set", fps=10, features=features, root=folder, rgb_encoder=encoder)
    for episode, length in enumerate(LENGTHS):
        for _ in range(length):
            images = {camera: random.integers(0, 256, (*size, 3), np.uint8) for camera, size in CAMERAS.items()}
            state, action = (random.normal(size=n).astype(np.float32) for n in (3, 2))
            made.add_frame(images | {"observation.state": state, "action": action, "task": f"task {episode % 3}"})
        made.save_episode(parallel_encoding=False)
    made.finalize()
    return folder


def same_samples(folder: Path, cache: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    offsets = {"action": [n / 10 for n in range(HORIZON)], "observation.state": [-0.1, 0.0]}
    # PyAV, whose conversion to RGB is ours too: torchcodec's rounds otherwise in places.
    theirs = LeRobotDataset("own/set", folder, delta_timestamps=offsets, return_uint8=True, video_backend="pyav")
    with open_dataset(folder, cache) as mine:
        assert len(mine) == len(theirs)
        images = mine.images(range(len(mine)), list(CAMERAS))
        for frame in range(len(mine)):
            wanted = theirs[frame]
            for name, steps in (("action", range(HORIZON)), ("observation.state", (-1, 0))):
                window = mine.window(name, frame, steps)
                np.testing.assert_array_equal(window.values, wanted[name].numpy())
                np.testing.assert_array_equal(window.padding, wanted[f"{name}_is_pad"].numpy())
            assert mine.task(frame) == wanted["task"]
            for camera in CAMERAS:
                got = torch.from_numpy(images[camera][frame]).permute(2, 0, 1)
                assert torch.equal(got, wanted[camera]), f"{camera} {frame}"


def test_what_lerobot_writes_gives_the_samples_that_lerobot_reads(written: Path, tmp_path: Path) -> None:
    same_samples(written, tmp_path / "cache")


def test_the_tests_own_datasets_are_lerobot_datasets(tmp_path: Path) -> None:
    made = make(tmp_path / "set", lengths=LENGTHS, rate=Fraction(10), files=2)
    same_samples(made.folder, tmp_path / "cache")


def test_statistics_are_lerobots_where_those_are_exact(written: Path, tmp_path: Path) -> None:
    """Its mean, deviation, minimum and maximum; its quantiles are estimates from histograms, averaged over episodes."""
    import json

    theirs = json.loads((written / "meta/stats.json").read_text())
    with open_dataset(written, tmp_path / "cache") as mine:
        for name in ("action", "observation.state"):
            found = statistics([np.asarray(mine.columns[name])])
            for part in ("mean", "std", "min", "max"):
                np.testing.assert_allclose(getattr(found, part), theirs[name][part], rtol=1e-5, atol=1e-6)
            assert theirs[name]["count"] == [found.count]
