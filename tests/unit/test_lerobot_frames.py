"""Frames and windows of LeRobot datasets, against decoding every video from its first frame to its last."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from engine.data.lerobot.dataset import Dataset, open_dataset, steps_of
from engine.data.lerobot.video import Index, Videos
from engine.data.sources import BadSample, BadSamples
from engine.errors import UserError
from tests.unit.robot_sets import CAMERAS, LENGTHS, TASKS, Made, decode_all, encode, make

NTSC = Fraction(30000, 1001)
OPEN_GOP = {"x264-params": "open-gop=1:keyint=8:bframes=3:b-pyramid=normal:scenecut=0"}


def every_frame_is_right(dataset: Dataset, made: Made, seed: int = 0) -> None:
    """All frames of all cameras, in an order in which decoders must go forwards, backwards and to other files."""
    order = np.random.default_rng(seed).permutation(len(dataset)).tolist()
    found = dataset.images(order, list(CAMERAS))
    for camera in CAMERAS:
        for place, frame in enumerate(order):
            episode = dataset.episode_of(frame)
            wanted = made.frames[camera][episode][frame - dataset.first[episode]]
            np.testing.assert_array_equal(found[camera][place], wanted, err_msg=f"{camera} frame {frame}")


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize(
    "rate, options",
    [
        (Fraction(10), {}),
        (NTSC, {}),
        (NTSC, OPEN_GOP),
        (Fraction(7), {"g": "250"}),
        (Fraction(15), {"bf": "0", "g": "2"}),
    ],
)
def test_every_frame_is_the_one_that_plain_decoding_gives(
    tmp_path: Path, version: str, rate: Fraction, options: dict[str, str]
) -> None:
    made = make(tmp_path / "set", version, rate=rate, options=options, files=2)
    with open_dataset(made.folder, tmp_path / "cache") as dataset:
        assert dataset.meta.fps == float(rate)
        every_frame_is_right(dataset, made)


def test_both_versions_of_a_dataset_give_the_same_samples(tmp_path: Path) -> None:
    old, new = make(tmp_path / "old", "v2.1", seed=3), make(tmp_path / "new", "v3.0", seed=3)
    with open_dataset(old.folder, tmp_path / "c") as a, open_dataset(new.folder, tmp_path / "c") as b:
        assert len(a) == len(b) == sum(LENGTHS)
        for camera, images in a.images(range(len(a)), list(CAMERAS)).items():
            np.testing.assert_array_equal(np.stack(images), np.stack(b.images(range(len(b)), [camera])[camera]))
        for frame in range(len(a)):
            assert a.task(frame) == b.task(frame) == TASKS[a.episode_of(frame) % 2]
            for name in ("observation.state", "action", "timestamp"):
                np.testing.assert_array_equal(a.window(name, frame, [0]).values, b.window(name, frame, [0]).values)


def test_chunks_end_with_their_episode(tmp_path: Path) -> None:
    made = make(tmp_path / "set", lengths=(4, 1, 3))
    with open_dataset(made.folder, tmp_path / "cache") as dataset:
        actions = [one["action"] for one in made.arrays]
        chunk = dataset.window("action", 2, range(4))  # frames 2 and 3 of the first episode, then beyond it
        np.testing.assert_array_equal(chunk.values, actions[0][[2, 3, 3, 3]])
        assert chunk.padding.tolist() == [False, False, True, True]
        alone = dataset.window("action", 4, [-1, 0, 1])
        np.testing.assert_array_equal(alone.values, actions[1][[0, 0, 0]])
        assert alone.padding.tolist() == [True, False, True]
        before = dataset.window("action", 6, [-2, -1, 0, 1, 2])
        np.testing.assert_array_equal(before.values, actions[2][[0, 0, 1, 2, 2]])
        assert before.padding.tolist() == [True, False, False, False, True]


def test_offsets_in_seconds() -> None:
    assert steps_of([-0.1, 0, 0.1, 0.3], 10) == [-1, 0, 1, 3]
    assert steps_of([1 / 29.97, 0.0334], 29.97) == [1, 1]
    with pytest.raises(UserError, match=r"0.05 s is no whole number of frames at 10"):
        steps_of([0.1, 0.05], 10)


def test_where_a_joined_file_is_slightly_off_the_neighbours_are_not_taken(tmp_path: Path) -> None:
    """Roundings of the lengths of joined videos add up: times count from the frame that is nearest to the beginning."""
    encode(tmp_path / "v.mp4", 40, (32, 48), 1, Fraction(10), {})
    index = Index(tmp_path / "v.mp4")
    for off in (-0.04, 0.0, 0.04):  # of a frame of 0.1 s
        assert index.frames(2.0 + off, np.arange(5) / 10, 10.0).tolist() == [20, 21, 22, 23, 24]
    with pytest.raises(BadSample, match=r"the video ends at 3.900 s"):
        index.frames(3.9, np.array([0.0, 0.1]), 10.0)
    with pytest.raises(BadSample, match="has 10 frames a second, and the dataset 15"):
        index.frames(0.0, np.arange(6) / 15, 15.0)


def test_few_videos_stay_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.mp4" for n in range(5)]
    for n, path in enumerate(paths):
        encode(path, 6, (32, 48), n, Fraction(10), {})
    videos, plain = Videos(limit=2), [decode_all(path) for path in paths]
    for n in (0, 1, 2, 3, 4, 0, 4, 2):
        np.testing.assert_array_equal(videos.read(paths[n], [5, 0, 5]), np.stack([plain[n][i] for i in (5, 0, 5)]))
        assert len(videos._idle) <= 2
    videos.close()


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_what_is_wrong_is_named_and_counted(tmp_path: Path, version: str) -> None:
    made = make(tmp_path / "set", version, files=4)
    top = "observation.images.top"
    paths = sorted((made.folder / "videos").rglob("*.mp4"))
    tops = [path for path in paths if top in str(path)]
    tops[1].unlink()
    raw = tops[2].read_bytes()
    tops[2].write_bytes(raw[: len(raw) // 3])
    lines: list[str] = []
    bad = BadSamples(1, lines.append)
    with open_dataset(made.folder, tmp_path / "cache", bad) as dataset:
        assert dataset.good.tolist() == [True, False, True, True]
        assert list(bad.seen.items()) == [(f"{made.folder}: episode 1", f"{top}: '{tops[1]}' is missing")]
        broken = dataset.images([dataset.first[2]], [top])[top][0]
        assert isinstance(broken, BadSample) and str(tops[2]) in str(broken)
        np.testing.assert_array_equal(dataset.images([0], [top])[top][0], made.frames[top][0][0])
    with pytest.raises(UserError, match=r"episode 1.*is missing"):
        open_dataset(made.folder, tmp_path / "cache", BadSamples(0))


def test_actions_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = make(tmp_path / "set", "v2.1", lengths=(3, 4))
    path = made.folder / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    values = table["action"].to_pylist()
    values[2][1] = float("nan")
    place = table.column_names.index("action")
    pq.write_table(table.set_column(place, "action", pa.array(values, pa.list_(pa.float32(), 2))), path)
    bad = BadSamples(3)
    with open_dataset(made.folder, tmp_path / "cache", bad) as dataset:
        assert dataset.good.tolist() == [True, False]
    assert bad.seen == {f"{made.folder}: episode 1": "action is not finite (NaN or infinite) at frame 2"}


def test_a_folder_that_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no meta/info.json"):
        open_dataset(tmp_path, tmp_path / "cache")
    made = make(tmp_path / "set", lengths=(2,))
    info = made.folder / "meta/info.json"
    info.write_text(info.read_text().replace("v3.0", "v1.6"))
    with pytest.raises(UserError, match=r"codebase_version=v1.6; versions v2.0, v2.1, v3.0 are read"):
        open_dataset(made.folder, tmp_path / "cache")
