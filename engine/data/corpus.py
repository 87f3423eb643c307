"""The documents of a corpus by number: where each one lies, its text, and on which side of the split it is.

A document is a text file (or a piece of a long one), or a line of a JSONL file. Documents are never held in memory.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import numpy as np

from engine.data.files import FileReader, digest, line_bounds, piece_bounds, stamps
from engine.data.identity import corpus_identity
from engine.data.sources import BadSample, SourceFile, decode_text, list_files, parse_line
from engine.schema import Data

HASHED_AT_ONCE = 1 << 16


class Corpus:
    """Documents 0 .. len-1 in the order of the files.

    `held_out` (bool, one for each document) is the split, by a hash of the document's identity: the same document is on
    the same side whatever else the corpus holds. A corpus of one document is cut in two: its end is held out.
    """

    def __init__(self, files: list[SourceFile], kind: str, field: str, held_out: float, cache: Path):
        self.files, self.kind, self.field = files, kind, field
        self.reader = FileReader()
        self.bounds, counts = (
            line_bounds(files, self.reader, cache) if kind == "jsonl" else piece_bounds(files, self.reader)
        )
        # File f's documents are first[f] .. first[f+1]-1, and its bounds start at bounds[first[f] + f].
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self.cut: int | None = None
        self._split(held_out)
        settings = (kind, field, held_out)
        self.identity = corpus_identity(kind, files)
        self.cache_key = digest(settings, stamps(files))

    def __len__(self) -> int:
        return 2 if self.cut is not None else int(self.first[-1])

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return sum(file.size for file in self.files)

    def place(self, document: int) -> tuple[int, int, int]:
        """File number, first byte, and byte after the last one."""
        document = 0 if self.cut is not None else document
        file = int(self.first.searchsorted(document, side="right")) - 1
        start, end = self.bounds[document + file : document + file + 2].tolist()
        return file, start, end

    def size(self, document: int) -> int:
        """Bytes that the document takes in its file; a hint, not the length of its text."""
        _, start, end = self.place(document)
        return end - start

    def where(self, document: int) -> str:
        """What a message calls the document."""
        file, start, _ = self.place(document)
        path = self.files[file].path
        if self.kind == "jsonl":
            return f"{path}:{1 if self.cut is not None else document - int(self.first[file]) + 1}"
        return f"{path} (from byte {start})" if start else str(path)

    def read(self, document: int) -> str:
        """The text. Raises BadSample if it is not usable and UserError if the file has gone."""
        file, start, end = self.place(document)
        raw = self.reader.read(self.files[file].path, start, end)
        text = parse_line(raw, self.field) if self.kind == "jsonl" else decode_text(raw, start)
        if self.cut is None:
            return text
        return text[self.cut :] if document else text[: self.cut]

    def side(self, held_out: bool) -> np.ndarray:
        """The documents on one side of the split, int64."""
        return np.flatnonzero(self.held_out == held_out)

    def _split(self, share: float) -> None:
        documents = len(self)
        self.held_out = np.zeros(documents, dtype=bool)
        if share <= 0:
            return
        if documents == 1:
            self._cut_single(share)
            return
        lowest, highest = (2.0, 0), (-1.0, 0)
        for start in range(0, documents, HASHED_AT_ONCE):
            ids = np.arange(start, min(start + HASHED_AT_ONCE, documents))
            hashes = self._hashes(ids)
            self.held_out[ids] = hashes < share
            usable = np.where(self._sizes(ids) > 1, hashes, np.nan)  # a blank line is no use on either side
            if not np.isnan(usable).all():
                low, high = int(np.nanargmin(usable)), int(np.nanargmax(usable))
                lowest = min(lowest, (float(usable[low]), start + low))
                highest = max(highest, (float(usable[high]), start + high))
        if lowest[1] != highest[1]:  # at least two usable documents: at least one on each side
            self.held_out[lowest[1]], self.held_out[highest[1]] = True, False

    def _cut_single(self, share: float) -> None:
        try:
            text = self.read(0)
        except BadSample:
            return  # whoever reads it says so
        if len(text) < 2:
            return
        cut = min(max(1, int(len(text) * (1 - share))), len(text) - 1)
        line_end = text.rfind("\n", 0, cut) + 1
        self.cut = line_end if line_end > cut // 2 else cut
        self.held_out = np.array([False, True])

    def _hashes(self, ids: np.ndarray) -> np.ndarray:
        """A number in [0, 1) for each document, from its file's identity and its number in the file (SplitMix64)."""
        file = self.first.searchsorted(ids, side="right") - 1
        x = self._file_hashes[file] + (ids - self.first[file]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) / 2.0**64

    @functools.cached_property
    def _file_hashes(self) -> np.ndarray:
        digests = (hashlib.sha256(file.identity.encode("utf-8", "surrogateescape")).digest()[:8] for file in self.files)
        return np.array([int.from_bytes(d, "little") for d in digests], dtype=np.uint64)

    def _sizes(self, ids: np.ndarray) -> np.ndarray:
        file = self.first.searchsorted(ids, side="right") - 1
        return self.bounds[ids + file + 1] - self.bounds[ids + file]


def open_corpus(data: Data, cache: Path) -> Corpus:
    """The corpus that `data` names. `cache` keeps the line index of JSONL files. Raises UserError."""
    return Corpus(list_files(data), data.name, data.field, data.held_out, cache)
