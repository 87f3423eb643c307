"""Rows by their number in training's order, from one source or from several in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from engine.data.packing import Cursor, Packer, Rows, Window
from engine.data.schedule import Turns

PackerAt = Callable[[Cursor, int], Packer]  # (cursor, window) -> a packer whose next window is that one
Row = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Stream:
    """The endless rows of one source: its name, its weight, and how to begin at any window."""

    name: str
    weight: float
    packer_at: PackerAt


class RowReader:
    """Rows of one source, read forwards. The next window is packed while this one is used."""

    def __init__(self, packer: Packer):
        self.packer, self.size = packer, packer.window_rows
        self.cursors = {packer.window: packer.cursor}  # where each window seen so far begins
        self._windows: dict[int, Window] = {}
        self._lock = threading.Lock()  # a checkpoint asks for a place while batches are made
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._next: tuple[int, Future[Window]] = (packer.window, self._pool.submit(self._pack))

    def row(self, number: int) -> Row:
        """Tokens, labels and starts of a row."""
        while (window := self._windows.get(number // self.size)) is None:
            self._take_next()
        row = window.order[number % self.size]
        return window.rows.tokens[row], window.rows.labels[row], window.rows.starts[row]

    def cursor(self, window: int) -> Cursor:
        """Where a window begins. Another rank may be further than this one, whose rows then wait for their use."""
        while window not in self.cursors:
            self._take_next()
        return self.cursors[window]

    def forget_before(self, number: int) -> None:
        """Rows before this one are not asked for again."""
        with self._lock:
            self._windows = {index: window for index, window in self._windows.items() if index >= number // self.size}

    def close(self) -> None:
        """Stop packing, and the thread."""
        self.packer.stop()
        self._pool.submit(self.packer.close)  # on the packing thread: it may be in the middle of a window
        self._pool.shutdown(wait=False)

    def _take_next(self) -> None:
        number, future = self._next
        window = future.result()  # not under the lock: a checkpoint must not wait for rows that may never come
        with self._lock:
            if self._next[0] == number:
                self._windows[number] = window
                self._next = (number + 1, self._pool.submit(self._pack))

    def _pack(self) -> Window:
        window = self.packer.next_window()
        self.cursors[self.packer.window] = self.packer.cursor
        return window


class MixedReader:
    """Rows of several sources in turn, by their global number."""

    def __init__(self, streams: Sequence[Stream], turns: Turns, places: Sequence[tuple[int, Cursor]]):
        """`places`: the window that each source begins with, and where that begins."""
        self.turns = turns
        self.readers = [RowReader(s.packer_at(cursor, w)) for s, (w, cursor) in zip(streams, places, strict=True)]

    def read(self, first: int, count: int) -> tuple[Rows, list[int]]:
        """Rows `first` to `first + count - 1`, and the source of each."""
        places = [self.turns.place(number) for number in range(first, first + count)]
        picked = [self.readers[source].row(number) for source, number in places]
        return Rows(*(np.stack(part) for part in zip(*picked, strict=True))), [source for source, _ in places]

    def places(self, row: int) -> list[tuple[int, Cursor]]:
        """For each source the window that holds its first row from global row `row` on, and where it begins."""
        windows = [int(n) // reader.size for n, reader in zip(self.turns.before(row), self.readers, strict=True)]
        return [(window, reader.cursor(window)) for window, reader in zip(windows, self.readers, strict=True)]

    def forget_before(self, row: int) -> None:
        """Rows before this one are not asked for again."""
        for number, reader in zip(self.turns.before(row).tolist(), self.readers, strict=True):
            reader.forget_before(number)

    def stop(self) -> None:
        """Pack no more; who waits for a row gets Closed."""
        for reader in self.readers:
            reader.packer.stop()

    def close(self) -> None:
        """Stop packing."""
        for reader in self.readers:
            reader.close()
