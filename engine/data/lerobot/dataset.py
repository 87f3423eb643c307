"""A LeRobot dataset as samples: vectors of numbers around a frame, and that frame of every camera."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from engine.data.lerobot import ACTION, FRAME, TASK, TIME
from engine.data.lerobot.columns import read_columns
from engine.data.lerobot.meta import Meta, check_packages, read_meta
from engine.data.lerobot.video import Videos
from engine.data.sources import BadSample, BadSamples
from engine.errors import UserError

TOLERANCE = 0.1  # frames: how far a time offset may lie from a whole number of frames


@dataclass(frozen=True)
class Window:
    """Values of a feature at several offsets from a frame."""

    values: np.ndarray  # [T, ...]; beyond the episode its first or last ones
    padding: np.ndarray  # bool [T]: lies beyond the episode


class Dataset:
    """Frames 0 .. len-1 are those of the episodes one after the other. Safe to share between threads."""

    def __init__(self, meta: Meta, columns: dict[str, np.ndarray], good: np.ndarray, threads: int = 2):
        self.meta, self.columns, self.good = meta, columns, good
        lengths = [episode.length for episode in meta.episodes]
        self.first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)  # frames [first[e], first[e + 1])
        self.videos = Videos()
        self._pool: Executor = ThreadPoolExecutor(max(1, threads), thread_name_prefix="decode")
        self._threads = max(1, threads)

    def __len__(self) -> int:
        return int(self.first[-1])

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and close the videos."""
        self._pool.shutdown(cancel_futures=True)
        self.videos.close()

    def episode_of(self, frame: int) -> int:
        """The place of a frame's episode in `meta.episodes`."""
        return int(self.first.searchsorted(frame, side="right")) - 1

    def where(self, frame: int) -> str:
        """What a message calls the episode that a frame is of."""
        return f"{self.meta.folder}: episode {self.meta.episodes[self.episode_of(frame)].number}"

    def task(self, frame: int) -> str:
        """The instruction in words; empty where the dataset has none."""
        return self.meta.tasks.get(int(self.columns[TASK][frame]), "") if TASK in self.columns else ""

    def window(self, name: str, frame: int, steps: Sequence[int]) -> Window:
        """A feature `steps` frames before (negative) or after a frame of its episode."""
        episode = self.episode_of(frame)
        begin, end = self.first[episode], self.first[episode + 1]
        wanted = frame + np.asarray(steps, dtype=np.int64)
        values = np.asarray(self.columns[name][np.clip(wanted, begin, end - 1)])
        return Window(values.reshape(len(wanted), -1), (wanted < begin) | (wanted >= end))

    def images(self, frames: Sequence[int], cameras: Sequence[str]) -> dict[str, list[np.ndarray | BadSample]]:
        """camera -> for each frame uint8 [H, W, 3], or why it cannot be had. Videos are decoded side by side."""
        out: dict[str, list[np.ndarray | BadSample]] = {camera: [BadSample("")] * len(frames) for camera in cameras}
        parts: dict[tuple[str, Path], list[tuple[int, int]]] = {}  # (camera, file) -> (number in the file, place)
        for camera in cameras:
            for place, frame in enumerate(frames):
                try:
                    path, number = self._find(frame, camera)
                except BadSample as why:
                    out[camera][place] = why
                else:
                    parts.setdefault((camera, path), []).append((number, place))
        pieces = [(key, piece) for key, part in parts.items() for piece in self._pieces(sorted(part), len(parts))]
        for ((camera, _), piece), images in zip(pieces, self._pool.map(self._decode, pieces), strict=True):
            for (_, place), image in zip(piece, images, strict=True):
                out[camera][place] = image
        return out

    def _find(self, frame: int, camera: str) -> tuple[Path, int]:
        """The file of a frame, and its number in it. Raises BadSample."""
        episode = self.episode_of(frame)
        clip = self.meta.episodes[episode].clips[camera]
        index = self.videos.index(clip.path)
        begin = self.first[episode]
        time = float(self.columns[TIME][frame]) - float(self.columns[TIME][begin])
        try:
            return clip.path, int(index.frames(clip.begin, np.array([time]), self.meta.fps)[0])
        except BadSample as why:
            raise BadSample(f"{camera}: '{clip.path}': {why}") from None

    def _pieces(self, part: list[tuple[int, int]], files: int) -> list[list[tuple[int, int]]]:
        """A file's frames in as many pieces as keep every thread busy."""
        count = min(len(part), max(1, -(-self._threads // files)))
        size = -(-len(part) // count)
        return [part[at : at + size] for at in range(0, len(part), size)]

    def _decode(self, piece: tuple[tuple[str, Path], list[tuple[int, int]]]) -> list[np.ndarray | BadSample]:
        (camera, path), wanted = piece
        numbers = [number for number, _ in wanted]
        try:
            return list(self.videos.read(path, numbers))
        except BadSample:
            return [self._one(camera, path, number) for number in numbers]  # those that can be had

    def _one(self, camera: str, path: Path, number: int) -> np.ndarray | BadSample:
        try:
            return self.videos.read(path, [number])[0]
        except BadSample as why:
            return BadSample(f"{camera}: {why}")


def steps_of(seconds: Sequence[float], fps: float, name: str = ACTION) -> list[int]:
    """Time offsets as numbers of frames. UserError if one is no whole number of them."""
    exact = np.asarray(seconds, dtype=np.float64) * fps
    steps = np.rint(exact).astype(np.int64)
    if len(steps) and (off := np.abs(exact - steps)).max() > TOLERANCE:
        wrong = seconds[int(off.argmax())]
        raise UserError(f"{name}: an offset of {wrong:g} s is no whole number of frames at {fps:g} frames a second")
    return steps.tolist()


def open_dataset(path: Path, cache: Path, bad: BadSamples | None = None, threads: int = 2) -> Dataset:
    """The dataset in a folder. `cache` keeps its numbers; `bad` counts the episodes that cannot be used.

    Raises UserError for a folder that is no LeRobot dataset.
    """
    check_packages()
    meta, bad = read_meta(path), bad or BadSamples(0)
    columns, good = read_columns(meta, cache, bad)
    for place, episode in enumerate(meta.episodes):
        for camera, clip in episode.clips.items():
            if good[place] and not clip.path.is_file():
                bad.add(f"{meta.folder}: episode {episode.number}", f"{camera}: '{clip.path}' is missing")
                good[place] = False
    for name in (FRAME, TIME):
        if name not in columns:
            raise UserError(f"{path}: has no feature {name}; every LeRobot dataset has it")
    return Dataset(meta, columns, good, threads)
