"""Running what a user types, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from engine.metrics.meter import TIMING_FIELDS

REPO = Path(__file__).parent.parent.parent


def start(folder: Path, *overrides: str, path: Path | None = None) -> subprocess.Popen[str]:
    """`python -m zoo.qwen3 ...` in `folder`, as a process group; `path` comes first on PYTHONPATH."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.Popen(
        [sys.executable, "-m", "zoo.qwen3", "hardware=cpu", *overrides],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(folder: Path, *overrides: str, path: Path | None = None, timeout: float = 300) -> tuple[int, str]:
    """Exit status and all output."""
    process = start(folder, *overrides, path=path)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def kill_after(process: subprocess.Popen[str], metrics: Path, step: int, timeout: float = 200) -> None:
    """kill -9 the controller and its ranks as soon as `metrics` holds `step`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and any(row["step"] >= step for row in rows(metrics)):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} never came: {process.communicate()[0]}")


def rows(metrics: Path) -> list[dict]:
    """The complete rows of a metrics file."""
    lines = metrics.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def exact(metrics: Path) -> list[dict]:
    """Rows without the fields that are timings or memory."""
    return [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in rows(metrics)]
