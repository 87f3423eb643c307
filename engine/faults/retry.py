"""File reads that fail and are tried again: disks and network file systems have moments. Free of torch."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
FIRST_PAUSE_S = 0.25  # doubled with every further try
# What passes by itself. A file that is missing or may not be read stays so.
TRANSIENT = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ETIMEDOUT", "EAGAIN", "EINTR", "EBUSY", "ENOLCK", "EREMOTEIO", "ENODATA"),
        *(
            "ENETDOWN",
            "ENETUNREACH",
            "ENETRESET",
            "ECONNRESET",
            "ECONNABORTED",
            "ENOTCONN",
            "EHOSTDOWN",
            "EHOSTUNREACH",
        ),
    )
    if hasattr(errno, name)
)


class Retries:
    """Tries reads again up to `limit` times, and counts. Usable from any thread."""

    def __init__(self, limit: int = 4, log: Callable[[str], None] | None = None) -> None:
        self._lock = threading.Lock()
        self.begin(limit, log)

    def begin(self, limit: int, log: Callable[[str], None] | None = None) -> None:
        """Count from zero, with another limit."""
        self.limit, self.log, self.count = limit, log, 0

    def run(self, read: Callable[[], T], where: str, again: Callable[[], object] | None = None) -> T:
        """The value of `read`; `again` is called before it is tried once more. Raises the last try's OSError."""
        tries = 0
        while True:
            try:
                return read()
            except OSError as error:
                if error.errno not in TRANSIENT or tries >= self.limit:
                    raise
                pause = FIRST_PAUSE_S * 2**tries
                tries += 1
                with self._lock:
                    self.count += 1
                if self.log:
                    self.log(f"warning: {where}: {error.strerror}; try {tries} of {self.limit} more in {pause:g} s")
                time.sleep(pause)
                if again is not None:
                    again()


READS = Retries()  # of this process: readers are made deep inside the data's parts, and the count is one for all
