"""Qwen3-235B-A22B over eight ranks, without a byte of its weights."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from tests.freezing import freeze
from tests.parallel import fake_ranks
from tests.ranks import Ranks

HIDDEN, LAYERS, VOCABULARY = 4096, 94, 151936
HEADS, GROUPS, HEAD = 64, 4, 128
EXPERTS, WIDTH = 128, 1536


@pytest.mark.slow
def test_parameters_of_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    """tp 2 x pp 2 x dp 2 with the experts of a stage over its four ranks: counts as on paper, nothing twice."""
    config = freeze(
        tmp_path / "run",
        "qwen3",
        "model=235b_a22b",
        "launcher=print",
        *(f"parallelism.{key}" for key in ("tp=2", "sp=true", "pp=2", "ep=4", "dp=2", "strategy=zero1")),
        "precision=bf16",
    )
    (results,) = ranks.call(fake_ranks.instantiate, 1, config=str(config), size=8)
    attention = (2 * HEADS + 2 * GROUPS) * HEAD * HIDDEN // 2  # divided over tp
    whole = 2 * HEAD + 2 * HIDDEN + EXPERTS * HIDDEN  # norms and router, on every rank
    experts = EXPERTS // 4 * 3 * WIDTH * HIDDEN
    layers = LAYERS // 2 * (attention + whole + experts)
    first, last = layers + VOCABULARY // 2 * HIDDEN, layers + VOCABULARY // 2 * HIDDEN + HIDDEN
    assert [result["parameters"] for result in results] == [first] * 4 + [last] * 4
    held: Counter[str] = Counter()
    for result in results:
        for name, _, extent in result["blocks"]:
            held[name] += math.prod(extent)
    total = sum(held.values())
    assert total == 235_093_634_560  # transformers' count of the published configuration
    assert len(set(held)) == 2 + 1 + LAYERS * (2 + 2 + 4 + 1 + 3 * EXPERTS)
