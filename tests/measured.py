"""The largest errors that the parity tests measured, kept in a file if one is named.

`ZOO_MEASURED=measured.json pytest ... tests/parity/test_forward.py` adds to the file what it measures: for each family
and layout the largest deviations from the reference over all its cases. `python -m tests.families_page measured.json`
makes docs/families.md of it.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

VARIABLE = "ZOO_MEASURED"

Measured = dict[str, dict[str, dict[str, float]]]  # family, layout, what


def load(path: Path) -> Measured:
    """What was measured."""
    return json.loads(path.read_text())


def record(family: str, layout: str, errors: dict[str, float]) -> None:
    """Keep the larger of what is there and what is new, if a file is named."""
    if not (name := os.environ.get(VARIABLE)):
        return
    with Path(name).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests run in several processes
        file.seek(0)
        measured: Measured = json.loads(file.read() or "{}")
        there = measured.setdefault(family, {}).setdefault(layout, {})
        for what, error in errors.items():
            there[what] = float(f"{max(error, there.get(what, 0.0)):.3g}")
        file.truncate(0)
        file.write(json.dumps(measured, indent=1, sort_keys=True) + "\n")
