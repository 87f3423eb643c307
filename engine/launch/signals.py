"""Signals to the controller while no worker of its own takes them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from engine.errors import Stopped

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raised() -> Iterator[None]:
    """Within this a signal to stop becomes the exception `Stopped`, so that what was begun can be undone."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        for other in STOPPING:
            signal.signal(other, signal.SIG_IGN)  # undoing must not be cut short by an impatient second one
        raise Stopped(number)

    previous = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
