"""What a rank holds of each published tensor, and who speaks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(eq=False)
class Shard:
    """This rank's part of one published tensor: published[offset : offset + local.shape].

    `local` shares its memory with `parameter`. Over all ranks, every element is in exactly one `owned` shard.
    `updated` shards are those that this rank's optimizer changes.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    parameter: nn.Parameter
    local: Tensor
    owned: bool
    updated: bool

    @property
    def grad(self) -> Optional[Tensor]:
        """The gradient of `local`, in its shape."""
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each tensor, so that all ranks get about the same number of elements (largest first)."""
    load, owner = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner[index] = min(range(ranks), key=lambda r: (load[r], r))
        load[owner[index]] += sizes[index]
    return owner


def rows_of(rank: int, ranks: int, rows: int) -> int:
    """The first row of `rank` when `rows` are cut as torch.chunk cuts them: later ranks may get fewer or none."""
    return min(rows, rank * -(-rows // ranks))
