"""Flat ranges as rectangles: every element once, in order, whatever the range."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.backends.megatron.boxes import boxes
from engine.checkpoint.checksums import position


@pytest.mark.parametrize("shape", [(1,), (7,), (1, 1), (4, 3), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2)])
def test_every_range(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, end in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        found = []
        for offset, extent in boxes(start, end, shape):
            box = whole[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))]
            assert tuple(box.shape) == extent
            assert position(offset, shape) == box.flatten()[0]
            found += box.flatten().tolist()
        assert found == list(range(start, end))


def test_a_shard_of_whole_rows_is_one_rectangle() -> None:
    assert list(boxes(6, 12, (5, 3))) == [((2, 0), (2, 3))]
    assert list(boxes(7, 12, (5, 3))) == [((2, 1), (1, 2)), ((3, 0), (1, 3))]
