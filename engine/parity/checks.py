"""What is compared, how far apart it may be, and how that is said."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """The largest errors that count as equal. The fp32 ones are those of this project's own tests."""

    name: str
    outputs: float  # of logits: in fp32 the largest absolute error, in bf16 norm-wise relative
    outputs_relative: bool
    loss: float  # of job=forward, absolute
    gradients: float  # of each tensor, norm-wise relative
    experts: float  # share of the tokens that other experts see
    losses: float  # of each training step, relative
    grad_norms: float  # of each training step, relative


LIMITS = {
    "fp32": Limits("fp32", 1e-4, False, 1e-5, 1e-4, 0.0, 1e-5, 1e-4),
    # bf16 has 8 bits: a rounding is up to 4e-3 of a value, and some add up on the way through the layers. Which of two
    # nearly equal experts is chosen then is no error.
    "bf16": Limits("bf16", 3e-2, True, 1e-2, 1e-1, math.inf, 5e-3, 5e-2),
}


@dataclass(frozen=True)
class Check:
    """One comparison. An error that is no number is beyond every limit."""

    name: str
    kind: str  # what the error is
    count: int  # how many things were compared
    error: float  # the largest
    limit: float
    where: str = ""  # of the largest error

    @property
    def within(self) -> bool:
        return self.error <= self.limit

    def as_json(self) -> dict[str, Any]:
        """Plain values; an error or a limit that is not finite is None."""
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}
        return {**values, "within": self.within}


def worst(name: str, kind: str, limit: float, errors: Sequence[tuple[str, float]]) -> Check:
    """The check of many errors, each with its place: the first that is no number, else the largest."""
    where, error = max(errors, key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return Check(name, kind, len(errors), error, limit, where if error else "")


def verdict(checks: Sequence[Check], limits: Limits) -> str:
    """One line for all of them."""
    beyond = [check for check in checks if not check.within]
    if not beyond:
        named = ", ".join(f"{c.name} {number(c.error)}" for c in checks)
        return f"A and B agree within the limits of {limits.name}: {named}"
    named = "; ".join(
        f"{c.name} {number(c.error)}, at most {number(c.limit)}{f' ({c.where})' if c.where else ''}" for c in beyond
    )
    return f"A and B differ by more than the limits of {limits.name}: {named}"


def number(value: float) -> str:
    """An error or a limit for people."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.1e}"


def print_checks(checks: Sequence[Check]) -> None:
    """A table of the comparisons."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("compared", "number", "error", "largest", "limit", "", "where"):
        table.add_column(name, overflow="fold", justify="right" if name in ("number", "largest", "limit") else "left")
    for check in checks:
        state = "within" if check.within else "BEYOND"
        cells = (check.name, str(check.count), check.kind, number(check.error), number(check.limit), state, check.where)
        table.add_row(*cells)
    # A log has no width; a terminal folds what is too wide for it.
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)
