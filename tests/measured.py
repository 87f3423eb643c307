"""The largest errors that the parity tests measured, kept in a file if one is named.

`ZOO_MEASURED=tests/parity/measured.json pytest ... tests/parity/test_forward.py` adds to the file what it measures: for
each family and layout the largest deviations from the reference over all its cases. `python -m tests.families_page`
makes docs/families.md of it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "ZOO_MEASURED"
HOME = Path(__file__).parent / "parity" / "measured.json"

Measured = dict[str, dict[str, dict[str, float]]]  # family, layout, what


def load(path: Path = HOME) -> Measured:
    """What was measured; nothing where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def record(family: str, layout: str, errors: dict[str, float]) -> None:
    """Keep the larger of what is there and what is new, if a file is named."""
    if not (name := os.environ.get(VARIABLE)):
        return
    path = Path(name)
    measured = load(path)
    there = measured.setdefault(family, {}).setdefault(layout, {})
    for what, error in errors.items():
        there[what] = float(f"{max(error, there.get(what, 0.0)):.3g}")
    path.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")
