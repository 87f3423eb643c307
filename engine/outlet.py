"""Output that outlives its reader: `... | head -1` must not end a run."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any


class Outlet(io.FileIO):
    """A descriptor for output. Once the reader has left (a closed pipe, a lost terminal), the rest goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data) or 0


def lasting_output() -> None:
    """Make this process's stdout and stderr go on without their readers."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # closed from the start: nothing to keep up
            stream.flush()
            raw = Outlet(stream.fileno(), "wb", closefd=False)
            lines = raw.isatty() or name == "stderr"
            text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=lines)
            setattr(sys, name, text)
