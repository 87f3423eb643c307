"""Runs before anything else of a process: writes down its environment, and moves the driver's files for Zooforge."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def note_environment() -> None:
    """Source: Python's site module imports sitecustomize at start, so torch cannot have been there yet (certain)."""
    if folder := os.environ.get("FAKE_NOTES"):
        text = json.dumps({"environment": dict(os.environ), "torch": "torch" in sys.modules, "command": sys.orig_argv})
        (Path(folder) / f"{os.getpid()}.json").write_text(text)


def move_devices() -> None:
    """Source: documentation of Paddle and of containers for Kunlun; /dev/xpuctrl and /dev/xpu0 ... (high)."""
    if dev := os.environ.get("FAKE_DEV"):
        from hardware.kunlun import Kunlun

        Kunlun.__init__.__defaults__ = (Path(dev), Path(dev) / "net")


note_environment()
move_devices()
