"""Where every thread of a rank is, on request and when it crashes."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path


def rank_log(run_dir: Path, rank: int) -> Path:
    """The log of a rank: what it does not say on the terminal."""
    (run_dir / "logs").mkdir(exist_ok=True)
    return run_dir / "logs" / f"rank_{rank}.log"


def show_stacks_in(log: Path) -> None:
    """From now on SIGUSR1 and a crash in native code write all threads' Python stacks to the end of `log`.

    The handler runs outside Python, so it answers while the process waits in a collective too.
    """
    file = log.open("a")  # faulthandler keeps it
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
