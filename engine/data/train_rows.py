"""The training rows of one data-parallel rank, step after step, prepared ahead in threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from engine.data.batch import Batch, rows_to_batch
from engine.data.packing import Cursor, Packer, Rows, Window
from engine.errors import UserError
from engine.schema import Data

STATE_VERSION = 1
OTHER = {
    "corpus": "other data: files behind data.path were added, removed, or changed in size",
    "tokenizer": "another tokenizer than this run's",
}
PackerAt = Callable[[Cursor, int], Packer]  # (cursor, window) -> a packer whose next window is that one


def to_batch(rows: Rows, sample_ids: list[int], pin_memory: bool = False) -> Batch:
    """Rows as a micro-batch."""
    tokens, labels = (torch.from_numpy(part.astype(np.int64)) for part in (rows.tokens, rows.labels))
    batch = rows_to_batch(tokens, labels, torch.from_numpy(rows.starts), sample_ids)
    if not pin_memory:
        return batch
    pinned = (t.pin_memory() for t in (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.cu_seqlens))
    return Batch(*pinned, batch.max_seqlen, batch.sample_ids)


class RowReader:
    """Rows by their number in training's order, read forwards. The next window is packed while this one is used."""

    def __init__(self, packer: Packer):
        self.packer, self.size = packer, packer.window_rows
        self.cursors = {packer.window: packer.cursor}  # where each window seen so far begins
        self._windows: dict[int, Window] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._next: tuple[int, Future[Window]] = (packer.window, self._pool.submit(self._pack))

    def read(self, first: int, count: int) -> Rows:
        """Rows `first` to `first + count - 1`."""
        picked = []
        for number in range(first, first + count):
            window = self._window(number // self.size)
            row = window.order[number % self.size]
            picked.append((window.rows.tokens[row], window.rows.labels[row], window.rows.starts[row]))
        return Rows(*(np.stack(part) for part in zip(*picked, strict=True)))

    def forget_before(self, number: int) -> None:
        """Rows before this one are not asked for again."""
        self._windows = {index: window for index, window in self._windows.items() if index >= number // self.size}

    def close(self) -> None:
        """Stop packing."""
        self._pool.submit(self.packer.close)  # on the packing thread: it may be in the middle of a window
        self._pool.shutdown(wait=False)

    def _window(self, index: int) -> Window:
        while index not in self._windows:
            number, future = self._next
            self._windows[number] = future.result()
            self._next = (number + 1, self._pool.submit(self._pack))
        return self._windows[index]

    def _pack(self) -> Window:
        window = self.packer.next_window()
        self.cursors[self.packer.window] = self.packer.cursor
        return window


class TrainData:
    """Step s uses rows [s * global_batch_size, (s + 1) * global_batch_size), each rank a contiguous share of them."""

    def __init__(
        self,
        packer_at: PackerAt,
        data: Data,
        identity: dict[str, Any],
        dp_rank: int,
        dp_size: int,
        state: dict[str, Any] | None = None,
        pin_memory: bool = False,
        seek: Callable[[int], Cursor] | None = None,
    ):
        assert data.global_batch_size % (dp_size * data.micro_batch_size) == 0, "engine.resolve refuses this"
        self._packer_at, self._data, self._pin = packer_at, data, pin_memory
        self._seek = seek  # where a window begins, if that is known without packing what lies before it
        self._share, self._rank = data.global_batch_size // dp_size, dp_rank
        self._identity = identity | {"data.global_batch_size": data.global_batch_size}
        self._window_rows = max(1, data.shuffle_rows)
        step, window, cursor = 0, 0, Cursor()
        if state is not None:
            step, window, cursor = self._checked(state)
        self._start(step, window, cursor)

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next step. What goes wrong in the threads is raised here."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # for whoever asks again
            raise item
        self._step += 1
        return item

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps to go on with `step`: the same on every rank, whatever their number. Plain JSON."""
        row = step * self._data.global_batch_size
        window = row // self._window_rows
        cursor = self._reader.cursors[window]
        place = {
            "row": row,
            "window": window,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "offset": cursor.offset,
        }
        return {"version": STATE_VERSION, **place, "identity": self._identity}

    def skip_to(self, step: int) -> None:
        """Go on with this step. Costs the packing of what lies between it and the nearest known place before it."""
        if step == self._step:
            return
        target = step * self._data.global_batch_size // self._window_rows
        self.close()
        known = self._reader.cursors | {0: Cursor()}
        if self._seek:
            known[target] = self._seek(target)
        window = max(index for index in known if index <= target)
        self._start(step, window, known[window])

    def close(self) -> None:
        """Stop the threads."""
        self._stop.set()
        while self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(0.02)
        self._reader.close()

    def _start(self, step: int, window: int, cursor: Cursor) -> None:
        self._step = step
        self._stop = threading.Event()
        self._queue: queue.Queue[list[Batch] | BaseException] = queue.Queue(max(1, self._data.prefetch))
        self._reader = RowReader(self._packer_at(cursor, window))
        work = (step, self._reader, self._queue, self._stop)
        self._thread = threading.Thread(target=self._produce, args=work, name="batches", daemon=True)
        self._thread.start()

    def _produce(self, step: int, reader: RowReader, out: queue.Queue, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                first = step * self._data.global_batch_size
                reader.forget_before(first)
                out.put(self._batches(reader, first + self._rank * self._share))
                step += 1
        except BaseException as error:
            out.put(error)

    def _batches(self, reader: RowReader, first: int) -> list[Batch]:
        size = self._data.micro_batch_size
        starts = range(first, first + self._share, size)
        return [to_batch(reader.read(at, size), list(range(at, at + size)), self._pin) for at in starts]

    def _checked(self, state: dict[str, Any]) -> tuple[int, int, Cursor]:
        """Raises UserError if the state belongs to other data or settings: the samples would not be the same."""
        if state["version"] != STATE_VERSION:
            raise UserError(
                f"checkpoint.resume: data state of version {state['version']}; this Zooforge reads {STATE_VERSION}"
            )
        for key, value in self._identity.items():
            before = state["identity"].get(key)
            if before != value:
                what = OTHER.get(key, f"{key}={before}, and this run has {value}")
                raise UserError(
                    f"checkpoint.resume: the checkpoint was made with {what}; "
                    "resume with the same, or start afresh from its weights with model.weights"
                )
        cursor = Cursor(state["epoch"], state["position"], state["offset"])
        return state["row"] // self._data.global_batch_size, state["window"], cursor
