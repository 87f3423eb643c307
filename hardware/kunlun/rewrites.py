"""Settings that a P800 cannot have. The rest of a recipe is the same as on any hardware."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from hardware.base import Rewrite

Row = tuple[str, Callable[[Any], bool], Any, str]

ROWS: tuple[Row, ...] = (
    (
        "moe.dispatcher",
        lambda value: value in ("deepep", "flex", "hybridep"),
        "alltoall",
        "DeepEP and HybridEP are made for NVIDIA's GPUs and their links",
    ),
    (
        "precision.name",
        lambda value: value.startswith("fp8"),
        "bf16",
        "there is no FP8 arithmetic in what is published of this chip",
    ),
    (
        "precision.compile",
        lambda value: value is True,
        False,
        "the runtime stands in for torch.compile with a function that compiles nothing",
    ),
)


def rewrites(run: Any) -> list[Rewrite]:
    """What of a resolved run must change, in the order of the table."""
    return [Rewrite(key, value, reason) for key, applies, value, reason in ROWS if applies(attrgetter(key)(run))]
