"""Fixtures of the unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import engine.sweep.drive

STUB = Path(__file__).parent / "sweep_stub.py"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The words that begin a sweep of runs which are `sweep_stub.py`."""
    monkeypatch.setattr(
        engine.sweep.drive,
        "_command",
        lambda family, row, words: [sys.executable, str(STUB), *row.overrides, *words, f"run_id={row.run_id}"],
    )
    return ["hardware=cpu", f"output_dir={tmp_path / 'out'}", "-m"]
