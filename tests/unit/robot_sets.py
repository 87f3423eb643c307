"""Small LeRobot datasets with real videos, written by PyAV and pyarrow, and the frames that plain decoding gives."""

from __future__ import annotations

import functools
import io
import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

LENGTHS = (7, 1, 30, 13)  # an episode of one frame, and one of several groups of pictures
CAMERAS = {"observation.images.top": (48, 64), "observation.images.wrist": (32, 48)}  # height, width
REORDERED = 4  # frames: decoding times lie that much before the times of showing
TASKS = ("pick it up", "put it down")
Arrays = list[dict[str, np.ndarray]]


@dataclass
class Made:
    """What a dataset was written from."""

    folder: Path
    arrays: Arrays  # by episode: state [L, 3], action [L, 2]
    frames: dict[str, list[list[np.ndarray]]]  # by camera, episode and frame, decoded one after the other


def encode(path: Path, frames: int, size: tuple[int, int], seed: int, rate: Fraction, options: dict[str, str]) -> None:
    """A video of moving gradients and noise, in which no two frames look alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_encoded(frames, size, seed, rate, tuple(options.items())))


@functools.cache  # the encoder does not give the same bytes every time
def _encoded(frames: int, size: tuple[int, int], seed: int, rate: Fraction, options: tuple) -> bytes:
    random, (height, width) = np.random.default_rng(seed), size
    y, x = np.mgrid[:height, :width]
    written = io.BytesIO()
    with av.open(written, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt, stream.options = width, height, "yuv420p", dict(options)
        for n in range(frames):
            image = np.stack([x * 3 + n * 7, y * 4 + n * 5, x + y + n * 11], -1) % 256
            image[: height // 4] = random.integers(0, 256, (height // 4, width, 3))
            out.mux(stream.encode(av.VideoFrame.from_ndarray(image.astype(np.uint8), "rgb24")))
        out.mux(stream.encode())
    return written.getvalue()


def decode_all(path: Path) -> list[np.ndarray]:
    """Every frame, from the first to the last."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def join(parts: list[Path], out_path: Path, lengths: list[int], rate: Fraction) -> list[float]:
    """Videos one after the other in one file, their packets as they are; returns where each begins, in seconds."""
    out_path.parent.mkdir(parents=True, exist_ok=True)
    begins, frames, packets = [], 0, 0
    with av.open(str(out_path), "w") as out:
        stream = None
        for path, length in zip(parts, lengths, strict=True):
            with av.open(str(path)) as source:
                video = source.streams.video[0]
                stream = stream or out.add_stream_from_template(video)
                offset = round(Fraction(frames) / rate / video.time_base)
                for packet in source.demux(video):
                    if packet.dts is not None:
                        # Decoding times must rise, and a video of one frame has no delay as the others have.
                        dts = round(Fraction(packets - REORDERED) / rate / video.time_base)
                        packet.pts, packet.dts, packet.stream = packet.pts + offset, dts, stream
                        packets += 1
                        out.mux(packet)
            begins.append(float(Fraction(frames) / rate))
            frames += length
    return begins


def make(
    folder: Path,
    version: str = "v3.0",
    lengths: tuple[int, ...] = LENGTHS,
    rate: Fraction = Fraction(10),
    seed: int = 0,
    options: dict[str, str] | None = None,
    files: int = 1,
) -> Made:
    """Write a dataset. The same arguments give the same episodes in both versions; of v3, `files` hold them."""
    options = {"bf": "3", "g": "12", "preset": "fast"} | (options or {})
    random = np.random.default_rng(seed)
    arrays = [{"observation.state": random.normal(size=(n, 3)), "action": random.normal(size=(n, 2))} for n in lengths]
    arrays = [{name: values.astype(np.float32) for name, values in one.items()} for one in arrays]
    single = {
        camera: [folder / f"videos/chunk-000/{camera}/episode_{e:06d}.mp4" for e in range(len(lengths))]
        for camera in CAMERAS
    }
    for number, (camera, size) in enumerate(CAMERAS.items()):
        for e, length in enumerate(lengths):
            encode(single[camera][e], length, size, 100 * seed + 10 * e + number, rate, options)
    frames = {camera: [decode_all(path) for path in paths] for camera, paths in single.items()}
    write = _write_3 if version == "v3.0" else _write_2
    write(folder, version, arrays, single, rate, files)
    return Made(folder, arrays, frames)


def _features() -> dict[str, dict]:
    found = {camera: {"dtype": "video", "shape": [*size, 3]} for camera, size in CAMERAS.items()}
    found["observation.state"] = {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]}
    found["action"] = {"dtype": "float32", "shape": [2], "names": {"motors": ["a", "b"]}}
    found["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    return found | {
        name: {"dtype": "int64", "shape": [1], "names": None}
        for name in ("frame_index", "episode_index", "index", "task_index")
    }


def _table(arrays: Arrays, first: int, index: int, rate: Fraction) -> pa.Table:
    """Rows of the episodes `first`, `first + 1`, ..., of which the first frame has the number `index`."""
    lengths = [len(one["action"]) for one in arrays]
    frame = np.concatenate([np.arange(n) for n in lengths])
    episode = np.repeat(np.arange(first, first + len(lengths)), lengths)
    columns = {
        name: pa.array(np.concatenate([one[name] for one in arrays]).tolist(), pa.list_(pa.float32(), size))
        for name, size in (("observation.state", 3), ("action", 2))
    }
    return pa.table(
        columns
        | {
            "timestamp": (frame / float(rate)).astype(np.float32),
            "frame_index": frame,
            "episode_index": episode,
            "index": index + np.arange(len(frame)),
            "task_index": episode % 2,
        }
    )


def _info(folder: Path, version: str, arrays: Arrays, rate: Fraction, data: str, video: str) -> None:
    fps = int(rate) if rate.denominator == 1 else float(rate)
    (folder / "meta").mkdir(exist_ok=True)
    info = {"codebase_version": version, "fps": fps, "features": _features(), "chunks_size": 1000, "robot_type": "arm"}
    info |= {"total_episodes": len(arrays), "total_frames": sum(len(one["action"]) for one in arrays)}
    info |= {"total_tasks": len(TASKS), "splits": {"train": f"0:{len(arrays)}"}}
    (folder / "meta/info.json").write_text(json.dumps(info | {"data_path": data, "video_path": video}))


def _write_2(folder: Path, version: str, arrays: Arrays, single: dict, rate: Fraction, files: int) -> None:
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    _info(folder, version, arrays, rate, data, video)
    (folder / "data/chunk-000").mkdir(parents=True)
    index, lines = 0, []
    for e, one in enumerate(arrays):
        pq.write_table(_table([one], e, index, rate), folder / data.format(episode_chunk=0, episode_index=e))
        index += len(one["action"])
        lines.append(json.dumps({"episode_index": e, "tasks": [TASKS[e % 2]], "length": len(one["action"])}))
    (folder / "meta/episodes.jsonl").write_text("\n".join(lines) + "\n")
    tasks = [json.dumps({"task_index": n, "task": task}) for n, task in enumerate(TASKS)]
    (folder / "meta/tasks.jsonl").write_text("\n".join(tasks) + "\n")


def _write_3(folder: Path, version: str, arrays: Arrays, single: dict, rate: Fraction, files: int) -> None:
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    _info(folder, version, arrays, rate, data, video)
    rows, index = [], 0
    for file, episodes in enumerate(np.array_split(np.arange(len(arrays)), files)):
        part = [arrays[e] for e in episodes]
        lengths = [len(one["action"]) for one in part]
        path = folder / data.format(chunk_index=0, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(part, int(episodes[0]), index, rate), path)
        place = {"chunk_index": 0, "file_index": file}
        begins = {
            camera: join(
                [single[camera][e] for e in episodes], folder / video.format(video_key=camera, **place), lengths, rate
            )
            for camera in CAMERAS
        }
        for n, e in enumerate(episodes.tolist()):
            row = {"episode_index": e, "tasks": [TASKS[e % 2]], "length": lengths[n]}
            row |= {"data/chunk_index": 0, "data/file_index": file, "dataset_from_index": index}
            index += lengths[n]
            row["dataset_to_index"] = index
            for camera in CAMERAS:
                end = begins[camera][n] + float(lengths[n] / rate)
                row |= {f"videos/{camera}/{key}": value for key, value in place.items()}
                row |= {f"videos/{camera}/from_timestamp": begins[camera][n], f"videos/{camera}/to_timestamp": end}
            rows.append(row)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "meta/episodes/chunk-000/file-000.parquet")
    tasks = pd.DataFrame({"task_index": range(len(TASKS))}, index=pd.Index(TASKS, name="task"))
    tasks.to_parquet(folder / "meta/tasks.parquet")
    for paths in single.values():
        for path in paths:
            path.unlink()
