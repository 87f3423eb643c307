"""Frozen configs for tests, through the controller's own composition and resolution."""

from __future__ import annotations

import os
from pathlib import Path

from engine.cli import prepare
from engine.freeze import to_yaml


def freeze(run_dir: Path, family: str, *overrides: str) -> Path:
    """Compose, check and resolve what a user would type, and write `run_dir/config.yaml`.

    ZOO_TEST_HARDWARE=nvidia runs the same tests on GPUs.
    """
    hardware = os.environ.get("ZOO_TEST_HARDWARE", "cpu")
    place = [f"output_dir={run_dir.parent}", f"run_id={run_dir.name}"]
    run = prepare(family, [f"hardware={hardware}", *place, *overrides])
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(to_yaml(run))
    return run_dir / "config.yaml"
