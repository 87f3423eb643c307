"""Parquet files: rows are samples, row groups are read whole and kept for a while."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.data.formats.columns import no_column
from engine.data.formats.records import Records
from engine.data.sources import BadSample, BadSamples
from engine.errors import UserError
from engine.faults.retry import READS

GROUPS_KEPT = 8  # row groups of one column in memory; a window of shuffled documents spans a few


class ParquetCorpus(Records):
    """The order is that of the files and of the rows in them."""

    def _open(self, cache: Path, bad: BadSamples) -> list[int]:
        self._lock = threading.Lock()  # a reader is not made for several threads
        self._file = functools.lru_cache(maxsize=16)(lambda file: open_file(self.files[file].path))
        self._group = functools.lru_cache(maxsize=GROUPS_KEPT)(self._read_group)
        counts, groups = [], []
        for number, file in enumerate(self.files):
            try:
                meta = self._file(number).metadata
            except BadSample as why:
                bad.add(str(file.path), why)
                counts.append(0)
                groups.append(np.zeros(1, dtype=np.int64))
                continue
            columns = self._file(number).schema_arrow.names
            if self.field not in columns:
                raise no_column(file.path, self.field, columns)
            if not meta.num_rows:
                bad.add(str(file.path), "holds no row")
            counts.append(meta.num_rows)
            groups.append(np.cumsum([0, *(meta.row_group(g).num_rows for g in range(meta.num_row_groups))]))
        self._groups = groups
        return counts

    @property
    def shards(self) -> np.ndarray:
        """Row groups, empty ones left out."""
        return np.unique(np.concatenate([g[:-1] + begin for g, begin in zip(self._groups, self.first, strict=False)]))

    def value(self, file: int, index: int) -> Any:
        group = int(self._groups[file].searchsorted(index, side="right")) - 1
        with self._lock:
            column = self._group(file, group)
        return column[index - int(self._groups[file][group])].as_py()

    def _read_group(self, file: int, group: int) -> pa.ChunkedArray:
        try:
            source, where = self._file(file), str(self.files[file].path)
            return READS.run(lambda: source.read_row_group(group, columns=[self.field]), where).column(0)
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None):  # the system does not give the bytes, which says nothing of them
                raise UserError(f"data.path: '{self.files[file].path}' cannot be read ({_line(error)})") from None
            raise BadSample(f"lies in a damaged part of its file ({_line(error)})") from None


def open_file(path: Path) -> pq.ParquetFile:
    """Its footer. BadSample if it is no whole Parquet file."""
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise BadSample(f"is not a whole Parquet file ({_line(error)})") from None


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
