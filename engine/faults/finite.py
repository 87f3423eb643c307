"""Numbers that should be finite and are not: which tensors, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.base import TensorSource
from engine.comm import Comm
from engine.errors import UserError

NAMED = 8  # tensors that a message names; the rest are counted


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of those with a NaN or an infinite value, each once, in their order."""
    return list(dict.fromkeys(name for name, tensor in tensors if not bool(torch.isfinite(tensor).all())))


def gather_bad_tensors(mine: list[str], comm: Comm) -> tuple[tuple[str, ...], int | None]:
    """The tensors of all ranks, and the rank that they come from if it is one. Collective.

    Gradients that are already summed over ranks are bad on all of them: then no rank can be named.
    """
    answers = comm.all_gather(mine)
    ranks = [rank for rank, names in enumerate(answers) if names]
    return tuple(dict.fromkeys(name for names in answers for name in names)), ranks[0] if len(ranks) == 1 else None


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


class FileSource(TensorSource, Protocol):
    """A source of files that can say where it found something."""

    def file_of(self, kind: str, name: str) -> Path: ...


class FiniteSource:
    """A source whose tensors are looked at as they pass. `settle` then says which of them are of no use."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._bad: dict[str, None] = {}

    def read(
        self, kind: str, name: str, shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]
    ) -> Tensor:
        """See `engine.backends.base.TensorSource`."""
        tensor = self._source.read(kind, name, shape, offset, extent)
        if not bool(torch.isfinite(tensor).all()):
            what = name if kind == "param" else f"{kind} of {name}"
            self._bad[f"{what} (in {self._source.file_of(kind, name)})"] = None
        return tensor

    def settle(self, comm: Comm) -> None:
        """UserError on every rank if any read a value that is not finite. Collective."""
        bad = sorted({name for names in comm.all_gather(list(self._bad)) for name in names})
        if bad:
            raise UserError(f"weights hold NaN or infinite values: {listed(bad)}; other weights are needed")
