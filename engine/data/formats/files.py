"""Which files of record formats are read, and what the controller finds wrong with them. Free of torch and numpy."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

from engine.data.formats import check_package
from engine.data.formats.energon import excluded, field_map, folders, split_shards
from engine.data.formats.tar import tar_samples
from engine.data.sources import BadSample, BadSamples, SourceFile, list_files, refuse
from engine.errors import UserError
from engine.schema import Data

STATE, PARTS, INFO = "state.json", "dataset_dict.json", "dataset_info.json"
SAMPLES_CHECKED = 64  # of each shard, and that many shards


def datasets_folders(data: Data) -> list[SourceFile]:
    """The `datasets` folders of `data.path`; of one with several splits the one that `data.split` names."""
    found, problems = [], []
    for folder in folders(data):
        try:
            found.append(_datasets_folder(folder, data.split))
        except UserError as error:
            problems.append(str(error))
    refuse(problems)
    return found


def _datasets_folder(folder: Path, split: str) -> SourceFile:
    base = folder.parent
    if (folder / PARTS).is_file():
        splits = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
        if split not in splits:
            raise UserError(f"data.split={split}: '{folder}' has no such split; its splits are {', '.join(splits)}")
        folder = folder / split
    if not folder.is_dir():
        raise UserError(f"data.path: '{folder}' does not exist; name folders that datasets' save_to_disk wrote")
    if not (folder / STATE).is_file():
        raise UserError(f"data.path: '{folder}' holds no {STATE}; name a folder that datasets' save_to_disk wrote")
    stats = [path.stat() for path in sorted(folder.iterdir()) if path.is_file()]
    identity = folder.relative_to(base).as_posix()
    return SourceFile(str(base), identity, sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats))


def energon_files(data: Data) -> list[tuple[str, str]]:
    """(folder, shard) of the split that `data.split` names."""
    return [(str(folder), name) for folder in folders(data) for name in split_shards(folder, data.split)]


def check_records(data: Data, bad: BadSamples) -> None:
    """Find what is wrong with record files without reading all of them. Raises UserError."""
    check_package(data.name)
    files = list_files(data)
    if data.name in ("datasets", "parquet"):
        _check_tables(data, files, bad)
        return
    part = (field_map(data) if data.name == "energon" else data).field.partition(":")[0]
    left_out = set(excluded(data)) if data.name == "energon" else set()
    empty = [file for file in files[:SAMPLES_CHECKED] if not _check_shard(file, part, left_out, bad)]
    _refuse_empty(data, files, empty, "sample", bad)


def _check_tables(data: Data, files: list[SourceFile], bad: BadSamples) -> None:
    looked, empty = files[:SAMPLES_CHECKED], []
    has_rows = _check_parquet if data.name == "parquet" else _check_folder
    for file in looked:
        try:
            if has_rows(file.path, data.field):
                continue
        except BadSample as why:
            bad.add(str(file.path), why)
        empty.append(file)
    _refuse_empty(data, files, empty, "row", bad)


def _refuse_empty(data: Data, files: list[SourceFile], empty: list[SourceFile], what: str, bad: BadSamples) -> None:
    """UserError where no file holds anything; otherwise each empty one is a bad sample."""
    if len(empty) == len(files):
        some = f"name {data.name} data that has some{bad.account()}"
        raise UserError(f"data.path={data.path}: holds no {what}; {some}")
    for file in empty:
        bad.add(str(file.path), f"holds no {what}")


def rows_in_folder(folder: Path) -> bool:
    """Whether a `datasets` folder has a row. True where its files cannot be told: who opens it says what is wrong."""
    import pyarrow as pa

    for path in sorted(folder.glob("*.arrow")):
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as batches:
                if any(batch.num_rows for batch in batches):
                    return True
        except (OSError, pa.ArrowException):
            return True
    return False


def _check_folder(path: Path, field: str) -> bool:
    """Whether a `datasets` folder has a row. BadSample where it cannot be read, UserError without the column."""
    try:
        columns = list(json.loads((path / INFO).read_bytes()).get("features") or {})
    except (OSError, ValueError, AttributeError) as error:
        raise BadSample(f"is not a whole datasets folder: {INFO} cannot be read ({error})") from None
    _check_columns(path, columns, field)
    return rows_in_folder(path)


def _check_columns(path: Path, columns: list[str], field: str) -> None:
    if field not in columns:
        from engine.data.formats.columns import no_column

        raise no_column(path, field, columns)


def _check_parquet(path: Path, field: str) -> bool:
    """Whether a Parquet file has a row. BadSample for one that is not whole, UserError without the column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:  # it begins and ends with the same four bytes
            head = file.read(4)
            file.seek(-min(4, path.stat().st_size), os.SEEK_END)
            tail = file.read(4)
        if head != b"PAR1" or tail != b"PAR1":
            raise BadSample(
                "is not a Parquet file" if head != b"PAR1" else "is not a whole Parquet file: it is cut off"
            )
        meta = pq.read_metadata(path)
        columns = meta.schema.to_arrow_schema().names
    except (OSError, pa.ArrowException) as error:
        raise BadSample(f"is not a whole Parquet file ({str(error).splitlines()[0]})") from None
    _check_columns(path, columns, field)
    return bool(meta.num_rows)


def _check_shard(file: SourceFile, part: str, left_out: set[str], bad: BadSamples) -> bool:
    """Whether it holds a sample, left out or not. Raises UserError where none has the part."""
    samples = []
    try:
        for sample in itertools.islice(tar_samples(file.path), SAMPLES_CHECKED):
            if f"{file.identity}/{sample.key}" not in left_out:
                samples.append(sample)
    except BadSample as why:
        bad.add(str(file.path), why)
        return bool(samples or left_out)
    if samples and not any(part in sample.parts for sample in samples):
        there = sorted({name for sample in samples for name in sample.parts})
        raise UserError(
            f"data.path: the samples of '{file.path}' have no part '{part}' (their parts: {', '.join(there[:12])}); "
            "data.field names the one that holds the text"
        )
    return bool(samples or left_out)
