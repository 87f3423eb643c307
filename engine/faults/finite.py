"""Numbers that should be finite and are not: which tensors, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.base import TensorSource
from engine.comm import Comm
from engine.errors import UserError

NAMED = 8  # tensors that a message names; the rest are counted


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those with a NaN or an infinite value, each once, in their order."""
    return list(dict.fromkeys(name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())))


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


class FiniteSource:
    """A source whose tensors are looked at as they pass. `settle` then says which of them are of no use."""

    def __init__(self, source: TensorSource, place: Path) -> None:
        self._source, self._place = source, place
        self._bad: dict[str, None] = {}

    def read(
        self, kind: str, name: str, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]
    ) -> Tensor:
        """See `engine.backends.base.TensorSource`."""
        tensor = self._source.read(kind, name, shape, offset, extent)
        if not bool(torch.isfinite(tensor).all()):
            self._bad[name if kind == "param" else f"{kind} of {name}"] = None
        return tensor

    def settle(self, comm: Comm) -> None:
        """UserError on every rank if any read a value that is not finite. Collective."""
        bad = sorted({name for names in comm.all_gather(list(self._bad)) for name in names})
        if bad:
            raise UserError(f"{self._place}: {listed(bad)} hold NaN or infinite values; other weights are needed")
