"""A LeRobot dataset, version 3, from recorded episodes: a video of each episode and camera, and one table of numbers.

Source of the layout: lerobot 0.6.1, `datasets/utils.py` and `dataset_writer.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from engine.policy.conventions import Conventions
from eval.demos.act import ACTION, STATE

NAMES = {STATE: "observation.state", ACTION: "action"}
VERSION, CHUNK = "v3.0", 1000  # files of a folder
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
INFO, EPISODES, TASKS = "meta/info.json", "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet"
# Training reads single frames from anywhere: every other one is whole, as lerobot's own recorder writes them.
CODEC: dict[str, str] = {"g": "2", "bf": "0", "crf": "18", "preset": "veryfast"}
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


@dataclass(frozen=True)
class Recorded:
    """An episode on the disk: its numbers and, by camera, its video and what its pixels are like."""

    prompt: str
    numbers: dict[str, np.ndarray]  # `state` [T, D] and `action` [T, A], float32
    videos: dict[str, Path]
    pixels: dict[str, dict[str, Any]]

    @property
    def length(self) -> int:
        """Frames."""
        return len(self.numbers[ACTION])


def camera_key(name: str) -> str:
    """What a dataset calls a camera."""
    return f"observation.images.{name}"


def encode(path: Path, frames: np.ndarray, fps: float) -> None:
    """uint8 [T, H, W, 3] as H.264. Sides are even."""
    import av

    with av.open(str(path), "w", format="mp4") as video:
        stream = video.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options=CODEC)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for image in frames:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        video.mux(stream.encode())


def pixel_sums(frames: np.ndarray) -> dict[str, Any]:
    """What the statistics of a union are made of, by channel, of pixels in [0, 1]."""
    flat = frames.reshape(-1, 3)
    low, high = flat.min(0) / 255, flat.max(0) / 255
    ones, squares = flat.sum(0, dtype=np.float64), np.square(flat, dtype=np.float64).sum(0)
    return {
        "count": len(frames),
        "pixels": len(flat),
        "sum": (ones / 255).tolist(),
        "squares": (squares / 255**2).tolist(),
        "min": low.tolist(),
        "max": high.tolist(),
    }


def write(folder: Path, episodes: Sequence[Recorded], conventions: Conventions, notes: dict[str, Any]) -> None:
    """The dataset in `folder`, `meta/info.json` last: without it there is none. The videos stay where they were, too.

    `notes` goes into meta/recording.json.
    """
    import pandas as pd

    tasks = list(dict.fromkeys(episode.prompt for episode in episodes))
    (folder / EPISODES).parent.mkdir(parents=True, exist_ok=True)
    _write_numbers(folder / DATA.format(chunk_index=0, file_index=0), episodes, tasks, conventions.fps)
    rows, first = [], 0
    for number, episode in enumerate(episodes):
        rows.append(_row(folder, number, episode, first, conventions.fps))
        first += episode.length
    pd.DataFrame(rows).to_parquet(folder / EPISODES, index=False)
    named = pd.DataFrame({"task_index": range(len(tasks))}, index=pd.Index(tasks, name="task"))
    named.to_parquet(folder / TASKS)
    conventions.save(folder / "meta")
    (folder / "meta/stats.json").write_text(json.dumps(_statistics(episodes), indent=1) + "\n")
    (folder / "meta/recording.json").write_text(json.dumps(notes, indent=1) + "\n")
    temporary = folder / f"{INFO}.tmp"
    temporary.write_text(json.dumps(_info(episodes, len(tasks), conventions), indent=2) + "\n")
    temporary.replace(folder / INFO)


def _row(folder: Path, number: int, episode: Recorded, first: int, fps: float) -> dict[str, Any]:
    row: dict[str, Any] = {"episode_index": number, "tasks": [episode.prompt], "length": episode.length}
    row |= {"data/chunk_index": 0, "data/file_index": 0}
    row |= {"dataset_from_index": first, "dataset_to_index": first + episode.length}
    place = {"chunk_index": number // CHUNK, "file_index": number % CHUNK}
    for camera, source in episode.videos.items():
        key = camera_key(camera)
        target = folder / VIDEO.format(video_key=key, **place)
        target.parent.mkdir(parents=True, exist_ok=True)
        _place(source, target)
        row |= {f"videos/{key}/{name}": value for name, value in place.items()}
        row |= {f"videos/{key}/from_timestamp": 0.0, f"videos/{key}/to_timestamp": episode.length / fps}
    return row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}


def _place(source: Path, target: Path) -> None:
    """A file under another name too, where the disk can do that; else a copy."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _write_numbers(path: Path, episodes: Sequence[Recorded], tasks: list[str], fps: float) -> None:
    """One group of rows for each episode, as lerobot writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    first, writer = 0, None
    for number, episode in enumerate(episodes):
        frame = np.arange(episode.length)
        columns: dict[str, Any] = {}
        for name, values in episode.numbers.items():
            flat = pa.array(np.ascontiguousarray(values, np.float32).reshape(-1))
            columns[NAMES[name]] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        columns |= {"timestamp": (frame / fps).astype(np.float32), "frame_index": frame}
        columns |= {"episode_index": np.full_like(frame, number), "index": first + frame}
        columns |= {"task_index": np.full_like(frame, tasks.index(episode.prompt))}
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
        first += episode.length
    if writer:
        writer.close()


def _info(episodes: Sequence[Recorded], tasks: int, conventions: Conventions) -> dict[str, Any]:
    fps = int(conventions.fps) if float(conventions.fps).is_integer() else conventions.fps
    features: dict[str, Any] = {}
    for camera in conventions.cameras:
        told = {"height": camera.height, "width": camera.width, "channels": 3, "fps": fps, "codec": "h264"}
        told |= {"pix_fmt": "yuv420p", "is_depth_map": False}
        features[camera_key(camera.name)] = {
            "dtype": "video",
            "shape": [camera.height, camera.width, 3],
            "names": ["height", "width", "channels"],
            "info": {f"video.{key}": value for key, value in told.items()} | {"has_audio": False},
        }
    for name, space in ((STATE, conventions.state), (ACTION, conventions.action)):
        features[NAMES[name]] = {"dtype": "float32", "shape": [space.size], "names": list(space.names)}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    return {
        "codebase_version": VERSION,
        "robot_type": conventions.embodiment,
        "total_episodes": len(episodes),
        "total_frames": sum(episode.length for episode in episodes),
        "total_tasks": tasks,
        "chunks_size": CHUNK,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": DATA,
        "video_path": VIDEO,
        "features": features,
    }


def _statistics(episodes: Sequence[Recorded]) -> dict[str, Any]:
    """Of all episodes together, exactly; images have no quantiles."""
    found: dict[str, Any] = {}
    for name in NAMES:
        values = np.concatenate([episode.numbers[name] for episode in episodes]).astype(np.float64)
        one = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
        one |= {key: np.quantile(values, q, axis=0) for key, q in QUANTILES.items()}
        found[NAMES[name]] = {key: value.tolist() for key, value in one.items()} | {"count": [len(values)]}
    for camera in episodes[0].videos:
        parts = [episode.pixels[camera] for episode in episodes]
        count = sum(part["pixels"] for part in parts)
        mean = np.sum([part["sum"] for part in parts], 0) / count
        spread = np.sqrt(np.maximum(0, np.sum([part["squares"] for part in parts], 0) / count - mean**2))
        low, high = np.min([part["min"] for part in parts], 0), np.max([part["max"] for part in parts], 0)
        named = {"min": low, "max": high, "mean": mean, "std": spread}
        found[camera_key(camera)] = {key: value.reshape(3, 1, 1).tolist() for key, value in named.items()} | {
            "count": [sum(part["count"] for part in parts)]
        }
    return found
