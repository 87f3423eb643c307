"""What all record formats share: a document is the text in one part of a sample."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from engine.data.files import digest, stamps
from engine.data.identity import corpus_identity
from engine.data.sources import BadSample, BadSamples, checked_text, decode_text, list_files
from engine.data.split import Numbered
from engine.errors import UserError
from engine.schema import Data
from engine.words import kind_of


class Records(Numbered):
    """Samples by number. `data.field` names the part that holds the text."""

    def __init__(self, data: Data, cache: Path, bad: BadSamples):
        self.data, self.field = data, data.field
        self.files = list_files(data)
        counts = self._open(cache, bad)
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        if not len(self):
            raise UserError(
                f"data.path={data.path}: there is no sample in it; name {data.name} data that has some{bad.account()}"
            )
        self.split(data.held_out)
        self.identity = corpus_identity(data.name, self.files)
        self.cache_key = digest((data.name, data.field, data.split, data.held_out), stamps(self.files))

    @abstractmethod
    def _open(self, cache: Path, bad: BadSamples) -> list[int]:
        """Get ready; the number of samples of each file."""

    @abstractmethod
    def value(self, file: int, index: int) -> Any:
        """What lies in the text's part of a file's sample. Raises BadSample if there is no such part."""

    def read(self, document: int) -> str:
        file, index = self.place(document)
        return self.part(document, text_of(self.value(file, index), self.field))

    def place(self, document: int) -> tuple[int, int]:
        """File and the sample's number in it."""
        document = 0 if self.cut is not None else document
        file = int(self.first.searchsorted(document, side="right")) - 1
        return file, document - int(self.first[file])

    def where(self, document: int) -> str:
        file, index = self.place(document)
        return f"{self.files[file].path}: sample {index}"

    def size(self, document: int) -> int:
        file, _ = self.place(document)
        return self.files[file].size // max(1, int(self.first[file + 1] - self.first[file]))


def text_of(value: Any, field: str) -> str:
    """A part's value as text. Raises BadSample if it is none."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return decode_text(bytes(value))
    if isinstance(value, str):
        return checked_text(value)
    raise BadSample(f"has {kind_of(value)} under '{field}', not text")
