"""WebDataset and Energon shards: tar files, indexed once so that any sample can be read by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.cache import cached
from engine.data.files import FileReader, digest, stamps
from engine.data.formats.energon import excluded, field_map
from engine.data.formats.records import Records
from engine.data.formats.tar import tar_samples
from engine.data.sources import BadSample, BadSamples, SourceFile, parse_value
from engine.schema import Data

VERSION = 1
ABSENT = -1  # instead of a place: the sample has no such part


class WebDatasetCorpus(Records):
    """`data.field` is an extension such as `txt`, or `json:key` for a value in a JSON part."""

    def _open(self, cache: Path, bad: BadSamples) -> list[int]:
        self.reader = FileReader()
        self.part_name, _, self.key = self.field.partition(":")
        folder = cache / f"shards-{digest((VERSION, self.part_name), stamps(self.files), self._excluded())}"
        cached(folder, lambda temporary: self._build(temporary))
        meta = json.loads((folder / "meta.json").read_text())
        self.places = np.fromfile(folder / "places.bin", dtype=np.int64).reshape(-1, 2)
        for where, why in meta["problems"].items():
            bad.add(where, why)
        return meta["counts"]

    def value(self, file: int, index: int) -> Any:
        start, size = self.places[int(self.first[file]) + index].tolist()
        if start == ABSENT:
            raise BadSample(f"has no part '{self.part_name}'; data.field names the part that holds the text")
        raw = self.reader.read(self.files[file].path, start, start + size)
        return parse_value(raw, self.key) if self.key else raw

    def size(self, document: int) -> int:
        file, index = self.place(document)
        return int(self.places[int(self.first[file]) + index, 1])

    def _excluded(self) -> list[str]:
        """Samples that do not count, as `shard/key`."""
        return []

    def _build(self, folder: Path) -> None:
        counts: list[int] = []
        problems: dict[str, str] = {}
        left_out = set(self._excluded())
        with (folder / "places.bin").open("wb") as out:
            for file in self.files:
                places, why = self._places(file, left_out)
                if why or not places:
                    problems[str(file.path)] = why or "holds no sample"
                np.array(places, dtype=np.int64).tofile(out)
                counts.append(len(places))
        (folder / "meta.json").write_text(json.dumps({"counts": counts, "problems": problems}))

    def _places(self, file: SourceFile, left_out: set[str]) -> tuple[list[tuple[int, int]], str | None]:
        """Where the text's part of each sample lies, and what is wrong with the rest of the shard."""
        places = []
        try:
            for sample in tar_samples(file.path):
                if f"{file.identity}/{sample.key}" not in left_out:
                    places.append(sample.parts.get(self.part_name, (ABSENT, 0)))
        except BadSample as why:
            return places, str(why)
        return places, None


class EnergonCorpus(WebDatasetCorpus):
    """A prepared Energon dataset: the shards of one split, in its order, without what it excludes.

    Only its metadata is read. Python code that a dataset may bring (a sample loader) is never run.
    """

    def __init__(self, data: Data, cache: Path, bad: BadSamples):
        super().__init__(field_map(data), cache, bad)

    def _excluded(self) -> list[str]:
        return excluded(self.data)
