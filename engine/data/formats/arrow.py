"""Folders that `datasets` wrote with save_to_disk, memory-mapped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from engine.data.formats.columns import no_column
from engine.data.formats.files import rows_in_folder
from engine.data.formats.records import Records
from engine.data.sources import BadSamples


class DatasetsCorpus(Records):
    """The order is that of the dataset, its indices followed."""

    def _open(self, cache: Path, bad: BadSamples) -> list[int]:
        import datasets

        datasets.disable_progress_bars()
        self._lock = threading.Lock()  # the memory-mapped table answers one thread at a time
        self._tables: list[Any] = []
        for file in self.files:
            if not rows_in_folder(file.path):  # one that `datasets` writes and then cannot read
                bad.add(str(file.path), "holds no row")
                self._tables.append([])
                continue
            try:
                table = datasets.load_from_disk(str(file.path))
            except Exception as error:  # datasets and pyarrow raise many kinds
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                bad.add(str(file.path), f"cannot be read as a datasets folder ({why})")
                self._tables.append([])
                continue
            if self.field not in table.column_names:
                raise no_column(file.path, self.field, table.column_names)
            self._tables.append(table.select_columns([self.field]))
        return [len(table) for table in self._tables]

    def value(self, file: int, index: int) -> Any:
        with self._lock:
            return self._tables[file][index][self.field]
