"""What a rank holds of each published tensor, and who speaks for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.checkpoint.weight_map import WeightMap


@dataclass(eq=False)
class Shard:
    """This rank's part of one of the reference's parameters: parameter[offset : offset + local.shape].

    `local` shares its memory with `parameter`. Over all ranks, every element is in exactly one `owned` shard.
    `updated` shards are those that this rank's optimizer changes. `buffer`s are whole on every rank.
    """

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    parameter: Tensor  # or a buffer
    local: Tensor
    owned: bool
    updated: bool
    buffer: bool = False  # fp32, without gradient and optimizer state
    trained: bool = True  # checkpoints of a training run hold it
    summed: Optional[Tensor] = None  # fp32, over the micro-batches so far, where the parameter itself is bf16

    @property
    def grad(self) -> Optional[Tensor]:
        """The gradient of `local`, in its shape."""
        if self.summed is not None:
            return self.summed
        grad = self.parameter.grad
        return grad.to_local() if isinstance(grad, DTensor) else grad

    def add_up(self) -> None:
        """Add the parameter's gradient to the sum over micro-batches: sums of many would lose their tail in bf16."""
        grad, self.parameter.grad = self.parameter.grad, None
        if grad is not None:
            self.summed = grad.float() if self.summed is None else self.summed.add_(grad)


@dataclass(frozen=True)
class Piece:
    """A rectangle of a published tensor and the view of a local one that holds it."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    view: Tensor


def pieces(shard: Shard, tensor: Tensor, weight_map: WeightMap) -> Iterator[Piece]:
    """What `tensor`, which is laid out like the shard's part, holds of published tensors."""
    first = shard.offset[0] if shard.offset else 0
    if shard.name not in weight_map.published and len(shard.shape) > 1:
        first *= math.prod(shard.shape[1:-1])
        tensor = tensor.view(-1, shard.shape[-1])
    for block in weight_map.native_blocks(shard.name, tuple(tensor.shape), first):
        inside = tuple(slice(a, a + n) for a, n in zip(block.local_offset, block.extent, strict=True))
        yield Piece(block.name, block.shape, block.offset, tensor[inside])


def covers(parameters: Iterable[tuple[str, Tensor]], weight_map: WeightMap) -> bool:
    """Whether the reference's parameters and buffers are the published tensors, each element once.

    It has no layers for multi-token prediction.
    """
    held: dict[str, int] = dict.fromkeys(weight_map.published, 0)
    for name, parameter in parameters:
        try:
            shape = weight_map.native_shape(name)
        except KeyError:
            return False
        fits = tuple(parameter.shape) == shape if name in held else parameter.numel() == math.prod(shape)
        for block in weight_map.native_blocks(name, shape, 0) if fits else ():
            held[block.name] += math.prod(block.extent)
    wanted = {name: math.prod(shape) for name, shape in weight_map.published.items()}
    elsewhere = weight_map.predictors | weight_map.kept
    return held == {name: 0 if name in elsewhere else size for name, size in wanted.items()}


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
