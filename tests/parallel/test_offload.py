"""optim.offload: the same numbers as without it, and a state that goes on without it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.parallel import megatron_ranks, offload_ranks
from tests.parallel.megatron_ranks import (
    DENSE,
    PACKED,
    assemble,
    assert_curve,
    global_batch,
    reference,
    relative,
    weights_of,
)
from tests.ranks import Ranks

STEPS = [global_batch(rows, seed) for rows, seed in ((PACKED, 1), (DENSE, 2), (PACKED, 3), (DENSE, 4))]
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2_sp": {"tp": 2, "sp": True}}


def together(answers: list[Any]) -> tuple[Any, dict[Any, Tensor]]:
    """The curve, and the state of all ranks."""
    return answers[0][0], assemble([part for answer in answers for part in answer[1]])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloading_changes_no_number(ranks: Ranks, precision: str) -> None:
    """Weights and moments after a step, and after four, whose gradients know of each other's rounding; curves; and
    two more steps, where the other kind goes on from the state."""
    weights = weights_of(reference({}))
    for layout in LAYOUTS.values():
        here, there = (kind(layout, precision=precision) for kind in (megatron_ranks.Plan, offload_ranks.Plan))
        for count, tolerance in ((1, 1e-6), (4, 1e-5)):
            first = {"weights": weights, "steps": STEPS[:count], "size": 1}
            plain, offloaded = run(ranks, [(megatron_ranks.train, here, first), (offload_ranks.train, there, first)])
            assert all(answer[2] for answer in offloaded), "nothing was offloaded"
            (curve, state), (other_curve, other) = together(plain), together(offloaded)
            assert_curve(other_curve, curve, 1e-6)
            errors = {key: relative(other[key], tensor) for key, tensor in state.items()}
            assert max(errors.values()) < tolerance, errors
        more = {"weights": state, "steps": STEPS[:2], "size": 1, "updates": 4}
        plain, offloaded = run(ranks, [(megatron_ranks.train, here, more), (offload_ranks.train, there, more)])
        assert_curve(together(offloaded)[0], together(plain)[0], 1e-6)


def run(ranks: Ranks, calls: list[tuple[Any, Any, dict[str, Any]]]) -> list[list[Any]]:
    """What every rank gave, for each call."""
    tasks = [(function, {"plan": plan, **arguments}) for function, plan, arguments in calls]
    return list(zip(*ranks.call(offload_ranks.several, 2, calls=tasks), strict=True))
