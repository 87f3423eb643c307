"""The numbers of a LeRobot dataset, read from Parquet once and then mapped from files that all processes share.

Row n of every column is frame n in the order of the episodes, so that an episode's frames lie together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.data.cache import cached
from engine.data.files import digest
from engine.data.lerobot.meta import Episode, Feature, Meta
from engine.data.sources import BadSample, BadSamples
from engine.errors import UserError

GOOD = "good.npy"  # bool [episodes]: the episodes whose numbers can be used
WHY = "why.txt"  # one line for each that cannot: its place, a tab, the reason
LAYOUT = 1  # of the folder's files


def read_columns(meta: Meta, cache: Path, bad: BadSamples) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(column -> [frames, ...] by feature, bool [episodes]: usable). Each unusable episode is a bad sample.

    Raises UserError if there are more of those than `data.max_bad_samples`, or none can be used.
    """
    folder = cache / f"lerobot-{_key(meta)}"
    cached(folder, lambda temporary: _build(meta, temporary))
    for line in (folder / WHY).read_text().splitlines():
        number, _, why = line.partition("\t")
        bad.add(f"{meta.folder}: episode {number}", why)
    columns = {name: np.load(folder / _file(name), mmap_mode="r") for name in meta.numbers}
    return columns, np.load(folder / GOOD)


def _key(meta: Meta) -> str:
    paths = sorted({episode.data for episode in meta.episodes if episode.data.exists()})
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    lengths = [(episode.number, episode.length) for episode in meta.episodes]
    shapes = [(name, meta.features[name].dtype, meta.features[name].shape) for name in meta.numbers]
    return digest(LAYOUT, lengths, shapes, iter(stats))


def _file(name: str) -> str:
    return f"{digest(name)}.npy"


def _build(meta: Meta, folder: Path) -> None:
    frames = sum(episode.length for episode in meta.episodes)
    columns = {
        name: np.lib.format.open_memmap(
            folder / _file(name), "w+", np.dtype(meta.features[name].dtype), (frames, *_shape(meta.features[name]))
        )
        for name in meta.numbers
    }
    good, problems, first = np.ones(len(meta.episodes), dtype=bool), [], 0
    table: tuple[Path, dict[str, np.ndarray] | str] | None = None
    for place, episode in enumerate(meta.episodes):
        if table is None or table[0] != episode.data:
            table = episode.data, _read(episode.data, meta)
        try:
            values = _episode(meta, episode, table[1])
        except BadSample as why:
            good[place] = False
            problems.append(f"{episode.number}\t{why}")
        else:
            for name, column in columns.items():
                column[first : first + episode.length] = values[name]
        first += episode.length
    for column in columns.values():
        column.flush()
    np.save(folder / GOOD, good)
    (folder / WHY).write_text("".join(f"{line}\n" for line in problems))


def _shape(feature: Feature) -> tuple[int, ...]:
    return () if feature.shape == (1,) else feature.shape


def _read(path: Path, meta: Meta) -> dict[str, np.ndarray] | str:
    """The columns of a Parquet file, or what is wrong with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=list(meta.numbers), partitioning=None)
    except FileNotFoundError:
        return f"'{path}' is missing"
    except (OSError, pa.ArrowException) as error:
        return f"'{path}' is not a whole Parquet file ({str(error).splitlines()[0]})"
    if missing := [name for name in meta.numbers if name not in table.column_names]:
        raise UserError(f"'{path}' has no column {', '.join(missing)}, which meta/info.json names")
    return {name: _array(table[name].combine_chunks(), meta.features[name], path) for name in meta.numbers}


def _array(column, feature: Feature, path: Path) -> np.ndarray:
    import pyarrow as pa

    rows = len(column)
    while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    values = column.to_numpy(zero_copy_only=False)
    try:
        return values.reshape(rows, *_shape(feature)).astype(feature.dtype, copy=False)
    except ValueError:
        raise UserError(
            f"'{path}': {feature.name} has {values.size} numbers in {rows} rows, and meta/info.json says "
            f"shape {list(feature.shape)}"
        ) from None


def _episode(meta: Meta, episode: Episode, table: dict[str, np.ndarray] | str) -> dict[str, np.ndarray]:
    """An episode's rows of its file. Raises BadSample."""
    if isinstance(table, str):
        raise BadSample(table)
    rows = np.flatnonzero(table["episode_index"] == episode.number)
    if len(rows) != episode.length:
        raise BadSample(f"has {len(rows)} rows in '{episode.data}', and its metadata says {episode.length}")
    values = {name: table[name][rows] for name in meta.numbers}
    order = np.argsort(values["frame_index"], kind="stable")
    if (values["frame_index"][order] != np.arange(episode.length)).any():
        raise BadSample(f"its frames are not numbered 0 to {episode.length - 1}")
    for name, column in values.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            frame = int(np.argwhere(~np.isfinite(column.reshape(episode.length, -1)).all(1))[0, 0])
            raise BadSample(f"{name} is not finite (NaN or infinite) at frame {frame}")
    return {name: column[order] for name, column in values.items()}
