"""Reading what a sweep leaves."""

from __future__ import annotations

import json
from pathlib import Path


def home(tmp_path: Path) -> Path:
    """The folder of the only sweep."""
    (found,) = (tmp_path / "out" / "qwen3" / "sweeps").iterdir()
    return found


def summary(tmp_path: Path) -> list[dict]:
    return json.loads((home(tmp_path) / "summary.json").read_text())["runs"]
