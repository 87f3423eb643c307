"""Steps of data prepared ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """`make(step)` for one step after another, up to `depth` of them before they are asked for."""

    def __init__(self, make: Callable[[int], Item], step: int, depth: int, name: str):
        """Begins with `step`; `name` is the thread's."""
        self._make, self._stop = make, threading.Event()
        self._queue: queue.Queue[Item | BaseException] = queue.Queue(max(1, depth))
        self._taken: Item | BaseException | None = None
        self._thread = threading.Thread(target=self._produce, args=(step,), name=name, daemon=True)
        self._thread.start()

    def ready(self, seconds: float) -> bool:
        """Whether `next` would answer at once, now or within that time."""
        if self._taken is None:
            with suppress(queue.Empty):
                self._taken = self._queue.get(timeout=seconds)
        return self._taken is not None

    def next(self) -> Item:
        """What the next step is made of. What goes wrong in the thread is raised here."""
        item, self._taken = self._queue.get() if self._taken is None else self._taken, None
        if isinstance(item, BaseException):
            self._queue.put(item)  # for whoever asks again
            raise item
        return item

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        while self._thread.is_alive():
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(0.02)

    def _produce(self, step: int) -> None:
        try:
            while not self._stop.is_set():
                self._queue.put(self._make(step))
                step += 1
        except BaseException as error:
            self._queue.put(error)
