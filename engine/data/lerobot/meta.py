"""What a LeRobot folder says of itself: features, episodes, tasks and files. Free of torch.

Version 2 keeps a Parquet file and a video of each camera for every episode; version 3 lets episodes share files, and
its table of episodes says where each begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

from engine.data.lerobot import ACTION, EXTRA, PACKAGES
from engine.data.sources import LEROBOT
from engine.errors import UserError

INFO = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")


@dataclass(frozen=True)
class Clip:
    """An episode's part of a video file. `begin` is in seconds from the file's first frame."""

    path: Path
    begin: float = 0.0


@dataclass(frozen=True)
class Episode:
    """One demonstration. `data` is the Parquet file that holds its frames."""

    number: int
    length: int  # frames
    data: Path
    clips: dict[str, Clip] = field(default_factory=dict)  # by camera


@dataclass(frozen=True)
class Feature:
    """A column, or a camera."""

    name: str
    dtype: str  # video | image | string | a number's type
    shape: tuple[int, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Meta:
    """A whole dataset without its content."""

    folder: Path
    version: str
    fps: float
    robot: Optional[str]
    features: dict[str, Feature]
    tasks: dict[int, str]
    episodes: tuple[Episode, ...]

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras, in the dataset's order."""
        return tuple(name for name, feature in self.features.items() if feature.dtype == "video")

    @property
    def numbers(self) -> tuple[str, ...]:
        """The features that are vectors of numbers."""
        return tuple(name for name, feature in self.features.items() if feature.dtype in NUMBERS)

    def files(self) -> Iterator[Path]:
        """Every file that the samples come from, each once."""
        for episode in self.episodes:
            yield episode.data
        yield from dict.fromkeys(clip.path for episode in self.episodes for clip in episode.clips.values())


def check_packages() -> None:
    """Raise UserError if a package that reads LeRobot data is not installed. Imports nothing."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(
            f"data={LEROBOT} needs {' and '.join(missing)}, not installed here; add it: uv sync --extra {EXTRA}"
        )


def read_meta(folder: Path) -> Meta:
    """The metadata of a LeRobot folder. Raises UserError if it is none, or of a version that is not read."""
    info = _json(folder / INFO, folder)
    version = str(info.get("codebase_version"))
    if version not in VERSIONS:
        raise UserError(f"{folder / INFO}: codebase_version={version}; versions {', '.join(VERSIONS)} are read")
    try:
        features = {name: _feature(name, value) for name, value in info["features"].items()}
        fps = float(info["fps"])
        video = [name for name, feature in features.items() if feature.dtype == "video"]
        read = _version_3 if version == "v3.0" else _version_2
        tasks, episodes = read(folder, info, video)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}: its metadata is not LeRobot's of version {version} ({error!r})") from None
    if not fps > 0:
        raise UserError(f"{folder / INFO}: fps={fps}; it must be greater than 0")
    if not episodes:
        raise UserError(f"{folder}: holds no episode; record some, or leave it out")
    if images := [name for name, feature in features.items() if feature.dtype == "image"]:
        raise UserError(f"{folder}: {', '.join(images)} lies in Parquet as images; convert it to video with lerobot")
    if ACTION in features and features[ACTION].dtype not in NUMBERS:
        raise UserError(f"{folder}: {ACTION} is of type {features[ACTION].dtype}, not a vector of numbers")
    return Meta(folder, version, fps, info.get("robot_type"), features, tasks, tuple(episodes))


def _feature(name: str, value: dict[str, Any]) -> Feature:
    names = value.get("names")
    while isinstance(names, dict):  # {"motors": [...]}, as older recorders write
        names = next(iter(names.values()), None)
    named = tuple(map(str, names)) if isinstance(names, list) else ()
    return Feature(name, value["dtype"], tuple(int(n) for n in value["shape"]), named)


def _version_2(folder: Path, info: dict[str, Any], cameras: list[str]) -> tuple[dict[int, str], list[Episode]]:
    tasks = {int(line["task_index"]): str(line["task"]) for line in _lines(folder / "meta/tasks.jsonl")}
    size, episodes = int(info.get("chunks_size", 1000)), []
    for line in sorted(_lines(folder / "meta/episodes.jsonl"), key=lambda line: int(line["episode_index"])):
        number = int(line["episode_index"])
        place = {"episode_chunk": number // size, "episode_index": number}
        clips = {name: Clip(folder / info["video_path"].format(video_key=name, **place)) for name in cameras}
        episodes.append(Episode(number, int(line["length"]), folder / info["data_path"].format(**place), clips))
    return tasks, episodes


def _version_3(folder: Path, info: dict[str, Any], cameras: list[str]) -> tuple[dict[int, str], list[Episode]]:
    table = _table(folder / "meta/tasks.parquet")
    text = next(name for name in table.column_names if name != "task_index")  # the index of a pandas frame
    named = zip(table["task_index"].to_pylist(), table[text].to_pylist(), strict=True)
    tasks = {int(number): str(task) for number, task in named}
    wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for name in cameras:
        wanted += [f"videos/{name}/{part}" for part in ("chunk_index", "file_index", "from_timestamp")]
    rows = []
    for path in sorted((folder / "meta/episodes").glob("*/*.parquet")):
        rows += _table(path, wanted).to_pylist()
    episodes = []
    for row in sorted(rows, key=lambda row: row["episode_index"]):
        clips = {name: _clip(folder, info, name, row) for name in cameras}
        place = {"chunk_index": row["data/chunk_index"], "file_index": row["data/file_index"]}
        data = folder / info["data_path"].format(**place)
        episodes.append(Episode(int(row["episode_index"]), int(row["length"]), data, clips))
    return tasks, episodes


def _clip(folder: Path, info: dict[str, Any], camera: str, row: dict[str, Any]) -> Clip:
    chunk, file, begin = (row[f"videos/{camera}/{part}"] for part in ("chunk_index", "file_index", "from_timestamp"))
    path = info["video_path"].format(video_key=camera, chunk_index=int(chunk), file_index=int(file))
    return Clip(folder / path, float(begin))


def _table(path: Path, columns: Optional[list[str]] = None) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, columns=columns, partitioning=None)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy the dataset with its meta folder") from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a whole Parquet file ({str(error).splitlines()[0]})") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy the dataset with its meta folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not JSON lines ({error})") from None


def _json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"data.path: '{folder}' holds no {INFO}; name the folder of a LeRobot dataset") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value
