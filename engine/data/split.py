"""Documents by number, and the split into training and held-out ones, whatever the documents are stored in."""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod

import numpy as np

from engine.data.sources import BadSample, SourceFile

HASHED_AT_ONCE = 1 << 16


class Numbered(ABC):
    """Documents 0 .. len-1 in the order of the files.

    `held_out` (bool, one for each document) is the split, by a hash of the document's identity: the same document is on
    the same side whatever else the corpus holds. A corpus of one document is cut in two: its end is held out.
    """

    files: list[SourceFile]
    first: np.ndarray  # int64 [files + 1]: file f's documents are first[f] .. first[f + 1] - 1
    held_out: np.ndarray
    identity: str  # of the content, the same on another machine
    cache_key: str  # of the content and the settings, on this machine
    cut: int | None = None  # where the only document is cut

    @abstractmethod
    def read(self, document: int) -> str:
        """The text. Raises BadSample if it is not usable and UserError if the file has gone."""

    @abstractmethod
    def where(self, document: int) -> str:
        """What a message calls the document."""

    @abstractmethod
    def size(self, document: int) -> int:
        """Bytes that the document takes; a hint, not the length of its text."""

    def __len__(self) -> int:
        return 2 if self.cut is not None else int(self.first[-1])

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return sum(file.size for file in self.files)

    @property
    def shards(self) -> np.ndarray:
        """int64, rising: the documents at which a part begins that is best read from begin to end."""
        return self.first[:-1]

    def side(self, held_out: bool) -> np.ndarray:
        """The documents on one side of the split, int64."""
        return np.flatnonzero(self.held_out == held_out)

    def usable(self, ids: np.ndarray) -> np.ndarray:
        """bool: the documents that are known to hold something, without reading them."""
        return np.ones(len(ids), dtype=bool)

    def file_of(self, ids: np.ndarray) -> np.ndarray:
        """The number of each document's file."""
        return self.first.searchsorted(ids, side="right") - 1

    def split(self, share: float) -> None:
        """Decide which documents are held out; at least one on each side where there are two."""
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
            usable = np.where(self.usable(ids), hashes, np.nan)  # a blank line is no use on either side
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

    def part(self, document: int, text: str) -> str:
        """The document's part of a text that was cut, or the whole of one that was not."""
        if self.cut is None:
            return text
        return text[self.cut :] if document else text[: self.cut]

    def _hashes(self, ids: np.ndarray) -> np.ndarray:
        """A number in [0, 1) for each document, from its file's identity and its number in the file (SplitMix64)."""
        file = self.file_of(ids)
        x = self._file_hashes[file] + (ids - self.first[file]).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (x ^ (x >> np.uint64(31))) / 2.0**64

    @functools.cached_property
    def _file_hashes(self) -> np.ndarray:
        digests = (hashlib.sha256(file.identity.encode("utf-8", "surrogateescape")).digest()[:8] for file in self.files)
        return np.array([int.from_bytes(d, "little") for d in digests], dtype=np.uint64)
