"""A corpus of text files: where each document lies, its text, and on which side of the split it is.

A document is a text file (or a piece of a long one), or a line of a JSONL file. Documents are never held in memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.data.files import FileReader, digest, line_bounds, piece_bounds, stamps
from engine.data.identity import corpus_identity
from engine.data.sources import CHAT, LEROBOT, BadSamples, SourceFile, decode_text, list_files, parse_line
from engine.data.split import Numbered
from engine.errors import UserError
from engine.schema import Data


class Corpus(Numbered):
    """Text and JSONL files."""

    def __init__(self, files: list[SourceFile], kind: str, field: str, held_out: float, cache: Path):
        self.files, self.kind, self.field = files, kind, field
        self.reader = FileReader()
        self.bounds, counts = (
            line_bounds(files, self.reader, cache) if kind == "jsonl" else piece_bounds(files, self.reader)
        )
        # File f's bounds start at bounds[first[f] + f].
        self.first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self.split(held_out)
        self.identity = corpus_identity(kind, files)
        self.cache_key = digest((kind, field, held_out), stamps(files))

    def place(self, document: int) -> tuple[int, int, int]:
        """File number, first byte, and byte after the last one."""
        document = 0 if self.cut is not None else document
        file = int(self.first.searchsorted(document, side="right")) - 1
        start, end = self.bounds[document + file : document + file + 2].tolist()
        return file, start, end

    def size(self, document: int) -> int:
        _, start, end = self.place(document)
        return end - start

    def where(self, document: int) -> str:
        file, start, _ = self.place(document)
        path = self.files[file].path
        if self.kind == "jsonl":
            return f"{path}:{1 if self.cut is not None else document - int(self.first[file]) + 1}"
        return f"{path} (from byte {start})" if start else str(path)

    def read(self, document: int) -> str:
        file, start, end = self.place(document)
        raw = self.reader.read(self.files[file].path, start, end)
        text = parse_line(raw, self.field) if self.kind == "jsonl" else decode_text(raw, start)
        return self.part(document, text)

    def usable(self, ids: np.ndarray) -> np.ndarray:
        file = self.file_of(ids)
        return self.bounds[ids + file + 1] - self.bounds[ids + file] > 1


def open_corpus(data: Data, cache: Path, bad: BadSamples | None = None) -> Numbered:
    """The corpus that `data` names. `cache` keeps indexes of lines and shards. Raises UserError.

    `bad` counts the shards of record formats that cannot be used.
    """
    from engine.data.formats import RECORDS, open_records

    if data.name == LEROBOT:
        raise UserError("data=lerobot holds demonstrations, and a language model reads text or chats")
    if data.name == CHAT:
        from engine.data.chat.corpus import ChatCorpus

        return ChatCorpus(data, cache)
    if data.name in RECORDS:
        return open_records(data, cache, bad or BadSamples(data.max_bad_samples))
    return Corpus(list_files(data), data.name, data.field, data.held_out, cache)
