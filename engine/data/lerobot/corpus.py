"""One source of demonstrations: a dataset or several, their frames in one numbering, split by episode."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.data.lerobot.dataset import Dataset, open_dataset
from engine.data.sources import BadSample, BadSamples
from engine.policy.statistics import Statistics, statistics


class Demonstrations:
    """Frames 0 .. len-1 of the datasets one after the other."""

    def __init__(self, datasets: Sequence[Dataset], names: Sequence[str], held_out: float):
        """`names`: what each dataset is called on any machine, from which the split follows."""
        self.datasets = datasets
        self.first = np.concatenate([[0], np.cumsum([len(one) for one in datasets])]).astype(np.int64)
        begins = [first + one.first[:-1] for one, first in zip(datasets, self.first[:-1], strict=True)]
        self.episodes = np.concatenate(begins)  # where each begins
        lengths = np.concatenate([np.diff(one.first) for one in datasets])
        good = np.concatenate([one.good for one in datasets])
        hashes = [_hash(name, e.number) for name, one in zip(names, datasets, strict=True) for e in one.meta.episodes]
        kept = _split(np.array(hashes), good, held_out)
        self._held_out = np.repeat(kept, lengths)
        self._good = np.repeat(good, lengths)
        self.episodes_of = {side: int((good & (kept == side)).sum()) for side in (False, True)}

    def __len__(self) -> int:
        return int(self.first[-1])

    def side(self, held_out: bool) -> np.ndarray:
        """int64, rising: the usable frames on one side of the split."""
        return np.flatnonzero(self._good & (self._held_out == held_out))

    def is_held_out(self, frame: int) -> bool:
        """The side of the split that a frame is on."""
        return bool(self._held_out[frame])

    def place(self, frame: int) -> tuple[Dataset, int]:
        """The dataset of a frame, and its number there."""
        number = int(self.first.searchsorted(frame, side="right")) - 1
        return self.datasets[number], frame - int(self.first[number])

    def values(self, name: str) -> list[np.ndarray]:
        """[N, D] of each dataset: a feature at all usable frames."""
        found = []
        for one in self.datasets:
            column = one.columns[name]
            mask = np.repeat(one.good, np.diff(one.first))
            found.append(np.asarray(column).reshape(len(one), -1)[mask])
        return found

    def images(
        self, frames: Sequence[int], cameras: Sequence[str]
    ) -> list[dict[str, np.ndarray] | tuple[str, BadSample]]:
        """For each frame its images by camera, or where it is and why they cannot be had."""
        placed = [self.place(frame) for frame in frames]
        out: list[dict[str, np.ndarray] | tuple[str, BadSample]] = [{} for _ in frames]
        for dataset in {id(one): one for one, _ in placed}.values():
            places = [n for n, (one, _) in enumerate(placed) if one is dataset]
            decoded = dataset.images([placed[n][1] for n in places], cameras)
            for number, place in enumerate(places):
                found = {camera: decoded[camera][number] for camera in cameras}
                why = next((image for image in found.values() if isinstance(image, BadSample)), None)
                out[place] = found if why is None else (dataset.where(placed[place][1]), why)
        return out

    def close(self) -> None:
        """Stop the threads and close the videos."""
        for one in self.datasets:
            one.close()


def open_demonstrations(
    folders: Sequence[Path], cache: Path, held_out: float, bad: BadSamples, threads: int
) -> Demonstrations:
    """The datasets in folders. Raises UserError."""
    opened = [open_dataset(folder, cache, bad, threads) for folder in folders]
    return Demonstrations(opened, [folder.name for folder in folders], held_out)


def union(demonstrations: Sequence[Demonstrations], names: Sequence[str]) -> dict[str, Statistics]:
    """Exact statistics of features over all usable frames of all sources, whatever their weights and the split."""
    return {name: statistics([part for one in demonstrations for part in one.values(name)]) for name in names}


def _hash(name: str, episode: int) -> float:
    """In [0, 1), the same for the same episode whatever else there is."""
    raw = hashlib.sha256(f"{name}/{episode}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(raw[:8], "little") / 2.0**64


def _split(hashes: np.ndarray, good: np.ndarray, share: float) -> np.ndarray:
    """bool: held out. At least one usable episode on each side where there are two."""
    held = hashes < share
    usable = np.flatnonzero(good)
    if share > 0 and len(usable) > 1:
        by_hash = usable[np.argsort(hashes[usable], kind="stable")]
        held[by_hash[0]], held[by_hash[-1]] = True, False
    return held
