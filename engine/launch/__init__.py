"""Launchers: how the workers of a frozen run are started."""

from __future__ import annotations

from collections.abc import Callable

from engine.family import load_dotted
from engine.rundir import RunFolder
from engine.schema import Run
from hardware.base import Hardware

LAUNCHERS = {
    "local": "engine.launch.local:launch",
    "torchrun": "engine.launch.torchrun:launch",
}
Launch = Callable[[Run, RunFolder, Hardware], int]


def launch(run: Run, folder: RunFolder, hardware: Hardware) -> int:
    """Start the workers, wait for them, and give the exit status of the run."""
    start: Launch = load_dotted(LAUNCHERS[run.launcher.name])
    return start(run, folder, hardware)
