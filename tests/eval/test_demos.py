"""`zoo demos` on the toy: what is recorded is what the expert did, survives interruptions, and succeeds again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.lerobot.dataset import open_dataset
from engine.data.lerobot.meta import read_meta
from engine.data.lerobot.request import request_of
from engine.errors import UserError
from engine.policy.describe import conventions_of
from eval.demos import recorder
from eval.demos.replay import replay
from eval.demos.settings import DemoSettings, ReplaySettings
from eval.episode import derive_seed
from eval.policies.toy_expert import Expert
from eval.policy import Request
from eval.toy import protocol as toy
from eval.toy.simulator import Toy

PRESET = toy.PRESETS["openpi"]
TASKS, EPISODES, SIZE = (0, 2), 2, 34
CAMERA = "observation.images.image"
STATES = [(task, state) for task in TASKS for state in (49, 48)]  # from the last initial state backwards


def settings(output: Path, **values: object) -> DemoSettings:
    given = {"benchmark": "toy", "suite": "toy_reach", "tasks": [*TASKS], "episodes": EPISODES, "resolution": SIZE}
    return DemoSettings(**given | {"output": str(output), "workers": 1} | values)  # type: ignore[arg-type]


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demos") / "set"
    summary = recorder.record(settings(folder), quiet)
    assert (summary["episodes"], summary["first_state"], summary["tried"]) == (4, 48, 4)
    return folder


def played(task: int, state: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States, actions and images of an episode of the expert, played here."""
    benchmark = toy.conventions(PRESET, SIZE)
    simulator, expert = Toy({"resolution": SIZE, "cameras": PRESET.cameras}), Expert(benchmark)
    seen = simulator.reset(task, state, derive_seed(PRESET.seed, "simulator"), True)
    rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    while not seen.success:
        action = expert.infer([Request({"observation/state": seen.state})])[0][0]
        rows.append((seen.state, action, seen.images["image"]))
        seen = simulator.step(action.astype(np.float64), True)
    states, actions, images = zip(*rows, strict=True)
    return np.stack(states), np.stack(actions), np.stack(images)


def test_the_dataset_holds_what_the_expert_saw_and_did(made: Path, tmp_path: Path) -> None:
    with open_dataset(made, tmp_path / "cache") as dataset:
        assert dataset.meta.version == "v3.0" and dataset.good.all() and len(dataset.meta.episodes) == 4
        assert dataset.meta.features["action"].names == ("dx", "dy", "gripper")
        for number, (task, state) in enumerate(STATES):
            states, actions, images = played(task, state)
            frames = range(int(dataset.first[number]), int(dataset.first[number + 1]))
            np.testing.assert_array_equal(dataset.columns["observation.state"][frames.start : frames.stop], states)
            np.testing.assert_array_equal(dataset.columns["action"][frames.start : frames.stop], actions)
            assert dataset.task(frames.start) == f"reach goal {task}"
            shown = np.stack(dataset.images(list(frames), [CAMERA])[CAMERA]).astype(float)
            assert shown.shape == images.shape
            # The codec loses colour, not brightness or place: each frame is most like its own image.
            off = np.abs(shown.mean(-1)[:, None] - images.astype(float).mean(-1)[None]).mean((2, 3))
            assert (off.argmin(1) == np.arange(len(frames))).all() and off.diagonal().max() < 2


def test_a_policy_that_learns_from_it_knows_its_conventions(made: Path) -> None:
    meta = read_meta(made)
    found = conventions_of("pi05", [meta], request_of(None, None, 6))
    expected = toy.conventions(PRESET, SIZE)
    assert found == dataclasses.replace(expected, family="pi05", horizon=6, replan=6)


def test_recorded_actions_succeed_again(made: Path) -> None:
    lines = replay(made, ReplaySettings(workers=1), quiet)
    assert [(line["task"], line["episode"], line["success"]) for line in lines] == [(*key, True) for key in STATES]


def table(folder: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(folder / "data/chunk-000/file-000.parquet")


def test_an_interrupted_recording_goes_on_and_a_finished_one_stays(
    made: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    kept: list[tuple[int, int]] = []
    keep = recorder._keep

    def noting(stage: Path, line: dict[str, Any], fps: float) -> None:
        keep(stage, line, fps)
        if line["success"]:
            kept.append((line["task"], line["episode"]))
        if len(kept) == 2 and not (stage / "stopped").exists():
            (stage / "stopped").touch()  # after its files and before its line: it has to be recorded again
            raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "_keep", noting)
    with pytest.raises(KeyboardInterrupt):
        recorder.record(settings(tmp_path / "set"), quiet)
    assert not (tmp_path / "set/meta/info.json").exists()
    with pytest.raises(UserError, match=r"different: seed \(7 there, 8 now\)"):
        recorder.record(settings(tmp_path / "set", seed=8), quiet)
    recorder.record(settings(tmp_path / "set"), quiet)
    assert len(kept) == 5 and kept[1] in kept[2:]
    assert table(tmp_path / "set").equals(table(made)) and not (tmp_path / "set/recording").exists()
    for file in ("meta/info.json", "meta/recording.json", "meta/conventions.json"):
        assert (tmp_path / "set" / file).read_text() == (made / file).read_text()
    recorder.record(settings(tmp_path / "set"), quiet)
    assert len(kept) == 5
    with pytest.raises(UserError, match="different: trials"):
        recorder.record(settings(tmp_path / "set", episodes=3), quiet)


def test_another_state_takes_the_place_of_one_that_fails(tmp_path: Path) -> None:
    """Six steps are too few from most initial states; the toy itself says from which."""
    able = [state for state in range(49, -1, -1) if len(played(0, state)[0]) <= 6]
    assert able and able[:2] != [49, 48]
    said: list[str] = []
    summary = recorder.record(settings(tmp_path / "set", tasks=[0], horizon=6), said.append)
    notes = json.loads((tmp_path / "set/meta/recording.json").read_text())
    assert [episode["state"] for episode in notes["episodes"]] == able[:2]
    assert summary["tried"] == 50 - able[1] and len(said) == summary["tried"] - 2
    with pytest.raises(UserError, match="succeeded in none of 50 episodes"):
        recorder.record(settings(tmp_path / "none", tasks=[0], horizon=1, workers=2), quiet)


@pytest.mark.parametrize(
    "values, said",
    [
        ({"suite": None}, "suite is missing; toy has toy_reach"),
        ({"suite": "toy_rech"}, "did you mean toy_reach"),
        ({"tasks": [3]}, "has the tasks 0 to 2"),
        ({"episodes": 51}, "from 1 to 50"),
        ({"episodes": 0}, "from 1 to 50"),
        ({"resolution": 33}, "it must be even"),
        ({"workers": 0}, "workers=0: it must be at least 1"),
        ({"gl": "glx"}, "the choices are egl, osmesa"),
        ({"benchmark": "liberro"}, "did you mean libero"),
        ({"preset": "nobody"}, "those of toy are openpi"),
        ({"seed": -1}, "seed=-1: it must be at least 0"),
        ({"output": None}, "output is missing"),
    ],
)
def test_what_cannot_be_recorded(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = dataclasses.replace(settings(tmp_path / "set"), **values)
    with pytest.raises(UserError, match=said):
        recorder.record(given, quiet)
    assert not (tmp_path / "set").exists()


def test_other_folders_are_left_alone_and_none_is_left_behind(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(UserError, match="it holds something else"):
        recorder.record(settings(tmp_path), quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    broken = settings(tmp_path / "new", tasks=[0])
    with pytest.raises(UserError, match="libero_expert"):
        monkeypatch.setattr(toy, "EXPERT", "libero_expert")
        recorder.record(broken, quiet)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=r"it is no dataset of `zoo demos`"):
        replay(tmp_path, ReplaySettings(), quiet)


@pytest.mark.slow
def test_lerobots_own_reader_gives_the_same_samples(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("lerobot.datasets.lerobot_dataset")
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    steps = [0, 1, 2]
    offsets = {"action": [n / 10 for n in steps]}
    theirs = LeRobotDataset("own/set", made, delta_timestamps=offsets, return_uint8=True, video_backend="pyav")
    with open_dataset(made, tmp_path / "cache") as mine:
        assert len(mine) == len(theirs) and theirs.num_episodes == 4
        images = mine.images(range(len(mine)), [CAMERA])[CAMERA]
        for frame in range(len(mine)):
            wanted, window = theirs[frame], mine.window("action", frame, steps)
            np.testing.assert_array_equal(window.values, wanted["action"].numpy())
            np.testing.assert_array_equal(window.padding, wanted["action_is_pad"].numpy())
            np.testing.assert_array_equal(mine.columns["observation.state"][frame], wanted["observation.state"].numpy())
            assert mine.task(frame) == wanted["task"]
            assert torch.equal(torch.from_numpy(images[frame]).permute(2, 0, 1), wanted[CAMERA])
    stats = theirs.meta.stats
    values = np.asarray(table(made)["action"].to_pylist())
    np.testing.assert_allclose(stats["action"]["mean"], values.mean(0), rtol=1e-6)
    assert stats[CAMERA]["mean"].shape == (3, 1, 1)
