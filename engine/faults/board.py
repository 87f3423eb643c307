"""What the ranks of a machine show their launcher: a page of shared memory for each. Free of torch.

A rank writes its place in the run there (a few machine words, about a microsecond) and, when it ends early, why. The
memory belongs to the launcher and has no name in any file system, so nothing is left behind however a run ends.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

VARIABLE = "ZOOFORGE_BOARD"  # where a worker finds its launcher's board
PAGE = 1 << 17  # bytes for each rank
# Native order and alignment, so that each number is stored at once and never read half written.
HEAD = struct.Struct("@qqqdqq")  # pid, rank, beats, time of the last beat, length of the operation, length of the note
OPERATION, NOTE = 64, 512  # where they begin


@dataclass(frozen=True)
class Seen:
    """One rank as its page shows it."""

    pid: int
    rank: int
    beats: int  # progress marks so far
    at: float  # CLOCK_MONOTONIC, which all processes of a machine share; 0: nobody may expect progress now
    operation: str  # what it is in
    note: dict[str, Any] | None  # how it ended: code, message, traceback, consequence, at


class Page:
    """A rank's own page. Without a launcher it is private memory that nobody reads."""

    def __init__(self, memory: mmap.mmap, start: int, watched: bool, rank: int) -> None:
        self._memory, self._start, self.watched = memory, start, watched
        self.rank, self._beats, self._operation = rank, 0, ""
        self._head(0.0, 0)

    @staticmethod
    def open(rank: int, slot: int) -> Page:
        """The page that the launcher gave to process `slot` of this machine."""
        path = os.environ.get(VARIABLE)
        try:
            with open(path or "", "r+b") as file:  # noqa: PTH123 - a descriptor of another process, no path to work with
                memory = mmap.mmap(file.fileno(), 0)
            if (slot + 1) * PAGE <= len(memory):
                return Page(memory, slot * PAGE, True, rank)
        except (OSError, ValueError):
            pass  # started by hand, or by a launcher that has gone
        return Page.private(rank)

    @staticmethod
    def private(rank: int) -> Page:
        """A page that nobody reads."""
        return Page(mmap.mmap(-1, PAGE), 0, False, rank)

    def beat(self, operation: str) -> None:
        """Progress was made, and this comes next. From here on the launcher expects more of it."""
        self._beats += 1
        if operation != self._operation:
            text = operation.encode()[: NOTE - OPERATION]
            self._memory[self._start + OPERATION : self._start + OPERATION + len(text)] = text
            self._operation = operation
        self._head(time.monotonic(), 0)

    def rest(self) -> None:
        """What comes now may take any time."""
        self._head(0.0, 0)

    def tell(self, code: int, message: str, traceback: str = "", consequence: bool = False) -> None:
        """Say how this rank ends: its exit status and why; `consequence` if it is for want of another rank."""
        room = PAGE - NOTE - 1024
        said = {"message": message[: room // 24], "traceback": traceback[-room // 24 :]}  # JSON may need 12 bytes each
        note = said | {"code": code, "consequence": consequence, "at": time.monotonic()}
        data = json.dumps(note).encode()
        self._memory[self._start + NOTE : self._start + NOTE + len(data)] = data
        self._head(0.0, len(data))

    def _head(self, at: float, note: int) -> None:
        length = min(len(self._operation.encode()), NOTE - OPERATION)
        HEAD.pack_into(self._memory, self._start, os.getpid(), self.rank, self._beats, at, length, note)


class Board:
    """The launcher's side: a page for each rank of this machine."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._file = os.memfd_create("zooforge-board")
        os.ftruncate(self._file, ranks * PAGE)
        self._memory = mmap.mmap(self._file, ranks * PAGE)

    def environment(self) -> dict[str, str]:
        """What tells workers where the board is."""
        return {VARIABLE: f"/proc/{os.getpid()}/fd/{self._file}"}

    def seen(self) -> Iterator[Seen]:
        """The ranks that have opened their pages."""
        for start in range(0, self.ranks * PAGE, PAGE):
            pid, rank, beats, at, operation, note = HEAD.unpack_from(self._memory, start)
            if pid:
                text = self._memory[start + OPERATION : start + OPERATION + operation].decode(errors="replace")
                yield Seen(pid, rank, beats, at, text, self._note(start + NOTE, note))

    def _note(self, start: int, length: int) -> dict[str, Any] | None:
        try:
            return json.loads(self._memory[start : start + length]) if length else None
        except ValueError:
            return None

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)
