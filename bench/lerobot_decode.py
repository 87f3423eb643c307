"""Decoded frames per second: this project's reader against lerobot's own dataset, on the same files.

    python -m bench.lerobot_decode [--frames 600] [--cameras 3] [--codec h264|libsvtav1] [--folder DIR]

Writes a LeRobot v3 dataset with lerobot itself (kept in --folder if that is given), then reads the same samples, in the
same random order, in batches of 32: one chunk of actions and a frame of each camera. lerobot is read with each of its
backends that works here, through PyTorch's DataLoader with one process for each core, and in this process; its best
counts. Needs the extra `embodied`. Run it on an idle machine; it prints the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BATCH, HORIZON, FPS, EPISODE = 32, 16, 20, 60
ROUNDS = 3


def write(folder: Path, frames: int, cameras: int, codec: str) -> None:
    """Moving pictures of 224 x 224."""
    from lerobot.configs import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    names = [f"observation.images.{n}" for n in range(cameras)]
    features = {name: {"dtype": "video", "shape": (224, 224, 3), "names": ["h", "w", "c"]} for name in names}
    features["observation.state"] = {"dtype": "float32", "shape": (8,), "names": list("abcdefgh")}
    features["action"] = {"dtype": "float32", "shape": (7,), "names": list("abcdefg")}
    encoder = RGBEncoderConfig(vcodec=codec)  # with lerobot's own distance between key frames
    made = LeRobotDataset.create("bench/set", fps=FPS, features=features, root=folder, rgb_encoder=encoder)
    y, x = np.mgrid[:224, :224]
    random = np.random.default_rng(0)
    for at in range(0, frames, EPISODE):
        for n in range(at, min(at + EPISODE, frames)):
            image = np.stack([x + 2 * n, y + n, (x + y) // 2 + 3 * n], -1) % 256
            sample = {name: np.roll(image, 20 * k, 1).astype(np.uint8) for k, name in enumerate(names)}
            sample["observation.state"] = random.normal(size=8).astype(np.float32)
            sample["action"] = random.normal(size=7).astype(np.float32)
            made.add_frame(sample | {"task": "stack the cubes"})
        made.save_episode(parallel_encoding=False)
    made.finalize()


def ours(folder: Path, order: list[int], threads: int) -> Iterator[None]:
    """One item for each batch."""
    from engine.data.lerobot.corpus import open_demonstrations
    from engine.data.lerobot.request import Request
    from engine.data.lerobot.samples import Reader
    from engine.data.sources import BadSamples

    bad = BadSamples(0)
    with tempfile.TemporaryDirectory() as cache:
        one = open_demonstrations([folder], Path(cache), 0.0, bad, threads)
        reader = Reader([one], Request(HORIZON), bad)
        for at in range(0, len(order), BATCH):
            part = order[at : at + BATCH]
            reader.batches([(0, frame) for frame in part], part, len(part))
            yield
        one.close()


def theirs(folder: Path, order: list[int], backend: str, workers: int) -> Iterator[None]:
    """One item for each batch."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    offsets = {"action": [n / FPS for n in range(HORIZON)]}
    data = LeRobotDataset("bench/set", folder, delta_timestamps=offsets, video_backend=backend, return_uint8=True)
    more = {"prefetch_factor": 4, "persistent_workers": True} if workers else {}
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=order, num_workers=workers, **more)
    yield from (None for _ in loader)


def rate(batches: Iterator[None], frames: int) -> float:
    """Frames per second from the second batch on: opening files and starting processes is not counted."""
    next(batches)
    begin = time.perf_counter()
    for _ in batches:
        pass
    return (frames - BATCH) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--cameras", type=int, default=3)
    parser.add_argument("--codec", default="h264")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    folder = args.folder or Path(tempfile.mkdtemp()) / "set"
    if not folder.exists():
        write(folder, args.frames, args.cameras, args.codec)
    order = np.random.default_rng(1).permutation(args.frames).tolist()
    sides = {"ours": lambda: ours(folder, order, cores)}
    for backend in ("torchcodec", "pyav"):
        for workers in (0, cores):
            sides[f"lerobot {backend}, {workers} processes"] = lambda b=backend, w=workers: theirs(folder, order, b, w)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):  # in turn, so that what else the machine does hits all of them
        for name, side in sides.items():
            try:
                found[name].append(rate(side(), len(order)) * args.cameras)
            except (ImportError, RuntimeError, OSError) as error:
                print(f"{name}: not here ({str(error).splitlines()[0]})")
    medians = {name: statistics.median(rates) for name, rates in found.items() if rates}
    for name, median in medians.items():
        print(f"{name}: {median:.0f} frames/s")
    best = max(rate for name, rate in medians.items() if name != "ours")
    print(f"ours / lerobot's best: {medians['ours'] / best:.2f}")


if __name__ == "__main__":
    main()
