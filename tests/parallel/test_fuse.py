"""Compiled layers, a loss without logits and the fused AdamW of the Megatron backend against transformers and torch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import fuse_ranks
from tests.parallel.megatron_ranks import (
    DENSE,
    PACKED,
    assert_curve,
    global_batch,
    reference,
    reference_steps,
    sequence,
    weights_of,
)
from tests.ranks import Ranks

STEPS = [global_batch(rows, seed) for rows, seed in ((DENSE, 1), (DENSE, 2), (PACKED, 3))]


@pytest.mark.parametrize(
    ("layout", "world", "tied", "size"),
    [
        ({}, 1, True, 2),
        ({"strategy": "ddp"}, 2, False, 2),
        ({"pp": 2, "vpp": 2}, 2, True, 2),
        ({"pp": 2, "vpp": 2}, 2, True, 4),  # one micro-batch, and one that only fills the pipeline up to its length
    ],
    ids=["single", "dp2", "pp2_vpp2", "pp2_vpp2_filled"],
)
@pytest.mark.parametrize("by_row", [False, True])
def test_the_curve_is_the_references(
    ranks: Ranks, layout: dict[str, Any], world: int, tied: bool, size: int, by_row: bool
) -> None:
    changes = {"tie_word_embeddings": tied}
    model = reference(changes)
    weights = weights_of(model)
    steps = STEPS if (world, by_row) == (1, False) else STEPS[:2]  # documents are compiled anew, which takes its time
    wanted = reference_steps(model, steps)
    plan = fuse_ranks.Plan(layout, changes)
    given = {"plan": plan, "by_row": by_row, "weights": weights, "steps": steps, "size": size}
    answers = ranks.call(sequence, world, calls=[(fuse_ranks.train, given)])
    for curve, _, compiled in (answer[0] for answer in answers):
        assert_curve(curve, wanted)
        assert compiled == 4 // layout.get("pp", 1)


@pytest.mark.parametrize(
    ("cp", "sources", "fused"), [(1, (), True), (2, (), True), (1, ("a", "b"), True), (2, ("a", "b"), False)]
)
def test_rows_that_ranks_share_are_told_apart_by_their_tokens(
    ranks: Ranks, cp: int, sources: tuple[str, ...], fused: bool
) -> None:
    (found,) = ranks.call(fuse_ranks.chosen, 1, cp=cp, sources=sources)
    assert bool(found) is fused
