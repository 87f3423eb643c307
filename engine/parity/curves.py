"""Two `metrics.jsonl` of training, step by step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Optional

from engine.errors import UserError
from engine.metrics.writer import read_rows
from engine.parity.checks import Check, Limits, worst

Steps = dict[int, dict[str, Any]]


def read_steps(path: Path) -> Steps:
    """The training steps of a metrics file by number; those of validation are left out."""
    return {row["step"]: row for row in read_rows(path) if "loss" in row}


def compare_curves(a: Steps, b: Steps, limits: Limits, first: Optional[int] = None) -> list[Check]:
    """Losses and gradient norms of the steps that both have, or of the `first` so many of them.

    Raises UserError if they share no step.
    """
    common = sorted(a.keys() & b.keys())[:first]
    if not common:
        raise UserError("A and B share no training step; give both the same schedule.steps")
    said = f"number, of {len(a)} in A and {len(b)} in B"
    other = [step for step in common if a[step].get("step_tokens") != b[step].get("step_tokens")]
    where = f"first at step {other[0]}" if other else ""
    checks = [Check("steps with other tokens", said, len(common), len(other), 0, where)]
    for name, key, limit in (
        ("training losses", "loss", limits.losses),
        ("gradient norms", "grad_norm", limits.grad_norms),
    ):
        errors = [(f"step {step}", _relative(a[step].get(key), b[step].get(key))) for step in common]
        checks.append(worst(name, "relative", limit, errors))
    return checks


def _relative(a: Any, b: Any) -> float:
    """|a - b| / |a|; NaN where either is no number, which the file has as null."""
    if not all(isinstance(x, (int, float)) for x in (a, b)):
        return math.nan
    return abs(a - b) / max(abs(a), 1e-12)
