"""The parity harness fails when something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.parity.mutations import run_mutated
from tests.ranks import Ranks

MUTATIONS = ("transform", "gradient", "mask")
FAULTS = [
    pytest.param(case, mutation, id=f"{case}-{mutation}")
    for case in harness.spine_cases()
    for mutation in (*MUTATIONS, *(("experts", "weights") if case.experts else ()))
]


@pytest.mark.parametrize(("case", "mutation"), FAULTS)
def test_a_fault_is_noticed(ranks: Ranks, case: harness.Case, mutation: str, tmp_path: Path) -> None:
    def run(config: Path, world: int) -> list[int]:
        return ranks.call(run_mutated, world, config=str(config), mutation=mutation)

    inputs = harness.packed_inputs(case.published["vocab_size"])
    expected = harness.expected_packed(harness.reference_of(case), inputs)
    got = harness.forward(ranks, case, "megatron-single", inputs, tmp_path / mutation, run=run)
    with pytest.raises(AssertionError):
        harness.assert_close(got, expected)
