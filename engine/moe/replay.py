"""Router decisions in the files of `job=forward`: `experts.<layer>` [B, S, k] int64, the experts of each token."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from engine.errors import UserError
from engine.moe.mixture import Mixture

NAME = re.compile(r"experts\.(\d+)")


def layer_of(name: str) -> int | None:
    """The layer of a tensor of decisions; None for other names."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else None


def check(decisions: dict[str, Tensor], path: Path, rows: tuple[int, int], mixture: Mixture) -> dict[str, Tensor]:
    """The decisions as int64. UserError unless every token has k different experts of the model."""
    for problem in _problems(decisions, (*rows, mixture.topk), mixture.experts):
        raise UserError(f"{path}: {problem}")
    return {name: chosen.long() for name, chosen in decisions.items()}


def _problems(decisions: dict[str, Tensor], shape: tuple[int, ...], experts: int) -> Iterator[str]:
    for name, chosen in decisions.items():
        if tuple(chosen.shape) != shape:
            yield f"{name} {list(chosen.shape)} should be [rows, tokens, experts of a token], {list(shape)}"
        elif chosen.is_floating_point():
            yield f"{name} {chosen.dtype} should be whole numbers (int64)"
        elif bool(((chosen < 0) | (chosen >= experts)).any()):
            yield f"{name} must lie in [0, {experts}) (num_experts)"
        elif bool((chosen.sort(-1).values.diff(dim=-1) == 0).any()):
            yield f"{name} names an expert twice for one token"
