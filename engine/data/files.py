"""Reading parts of many files, and where the documents in them begin and end."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import numpy as np

from engine.data.cache import cached
from engine.data.sources import SourceFile
from engine.errors import UserError
from engine.faults.retry import READS, TRANSIENT

PIECE = 1 << 20  # bytes; longer text files are cut at line ends, so that one file cannot fill the memory
CUT_SEARCH = 1 << 16  # bytes in which a line end is looked for
BLOCK = 1 << 20  # bytes read at once when lines are counted
OPEN_FILES = 64

Bounds = tuple[np.ndarray, list[int]]  # bounds of all files one after the other (n documents have n + 1), and each n


class FileReader:
    """Reads byte ranges from any thread, and keeps the most recent files open."""

    def __init__(self) -> None:
        # A file that drops out of the cache closes when its last reader lets go of it.
        self._open = functools.lru_cache(maxsize=OPEN_FILES)(lambda path: FileIO(path, "rb"))

    def read(self, path: Path, start: int, end: int) -> bytes:
        """Bytes [start, end), tried again where the trouble may pass. Raises UserError if they cannot be read."""
        try:
            data = READS.run(lambda: self._read(path, start, end), str(path), self._open.cache_clear)
        except OSError as error:
            tried = f" after {READS.limit} more tries" if error.errno in TRANSIENT and READS.limit else ""
            raise UserError(f"data.path: '{path}' cannot be read ({error.strerror}){tried}") from None
        if len(data) < end - start:
            raise UserError(f"data.path: '{path}' became shorter while it was read; leave the data alone during a run")
        return data

    def _read(self, path: Path, start: int, end: int) -> bytes:
        """Bytes [start, end), or up to the file's end."""
        parts, at = [], start
        file = self._open(path)
        while at < end and (part := os.pread(file.fileno(), end - at, at)):
            parts.append(part)
            at += len(part)
        return b"".join(parts)


def digest(*parts: object) -> str:
    """A short hash of plain values; of an iterator, its items one by one."""
    state = hashlib.sha256()
    for part in parts:
        for item in part if isinstance(part, Iterator) else (part,):
            state.update(json.dumps(item).encode() + b"\n")
    return state.hexdigest()[:24]


def stamps(files: Iterable[SourceFile]) -> Iterator[tuple[str, str, int, int]]:
    """What tells whether files are the ones that were read before: place, name, size and time of change."""
    place = functools.lru_cache(maxsize=8)(os.path.realpath)
    return ((place(file.base), file.identity, file.size, file.mtime_ns) for file in files)


def piece_bounds(files: list[SourceFile], reader: FileReader) -> Bounds:
    """Text files as documents; a long one is cut into pieces of about PIECE bytes."""
    pieces = [_cuts(file, reader) if file.size > PIECE else (0, file.size) for file in files]
    return np.array([bound for piece in pieces for bound in piece], dtype=np.int64), [
        len(piece) - 1 for piece in pieces
    ]


def _cuts(file: SourceFile, reader: FileReader) -> list[int]:
    """Cut at the first line end after every PIECE bytes, or between two characters if there is none nearby."""
    bounds = [0]
    for at in range(PIECE, file.size, PIECE):
        near = reader.read(file.path, at, min(at + CUT_SEARCH, file.size))
        further = near.find(b"\n") + 1
        if not further:
            further = next((i for i, byte in enumerate(near[:4]) if byte & 0xC0 != 0x80), 0)
        if at + further < file.size:
            bounds.append(at + further)
    return [*bounds, file.size]


def line_bounds(files: list[SourceFile], reader: FileReader, cache: Path) -> Bounds:
    """Lines as documents. Their bounds are kept in a file and mapped, so that their memory is the page cache's."""
    folder = cache / f"lines-{digest(stamps(files))}"

    def build(temporary: Path) -> None:
        counts = []
        with (temporary / "bounds.bin").open("wb") as out:
            for file in files:
                written = (out.write(ends.tobytes()) for ends in _line_ends(file, reader))
                counts.append(sum(written) // 8 - 1)
        (temporary / "counts.json").write_text(json.dumps(counts))

    cached(folder, build)
    bounds = np.memmap(folder / "bounds.bin", dtype=np.int64, mode="r").view(np.ndarray)
    return bounds, json.loads((folder / "counts.json").read_text())


def _line_ends(file: SourceFile, reader: FileReader) -> Iterator[np.ndarray]:
    """0, then the place after each line, as int64."""
    yield np.zeros(1, dtype=np.int64)
    last = b""
    for at in range(0, file.size, BLOCK):
        block = reader.read(file.path, at, min(at + BLOCK, file.size))
        yield np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == 10).astype(np.int64) + (at + 1)
        last = block[-1:]
    if last != b"\n":
        yield np.array([file.size], dtype=np.int64)
