"""Flat ranges of a tensor as rectangles: an optimizer's shard ends anywhere, a published slice is a rectangle."""

from __future__ import annotations

import math
from collections.abc import Iterator

from engine.checkpoint.weight_map import Shape

Box = tuple[Shape, Shape]  # offset and extent


def boxes(start: int, end: int, shape: Shape) -> Iterator[Box]:
    """The elements [start, end) of a row-major tensor as rectangles, in order."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), end // inner  # whole rows
    if first > last:  # inside one row
        yield from _in_row(last, start - last * inner, end - last * inner, shape)
        return
    if start < first * inner:
        yield from _in_row(first - 1, start - (first - 1) * inner, inner, shape)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * inner < end:
        yield from _in_row(last, 0, end - last * inner, shape)


def _in_row(row: int, start: int, end: int, shape: Shape) -> Iterator[Box]:
    for offset, extent in boxes(start, end, shape[1:]):
        yield (row, *offset), (1, *extent)
