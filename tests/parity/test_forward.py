"""Both backends, in every layout, give the reference's logits, loss and gradients; packed rows as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forward")


@pytest.mark.parametrize(("case", "layout"), harness.cases_and_layouts(packed=False))
def test_unpacked(ranks: Ranks, case: harness.Case, layout: str, root: Path) -> None:
    inputs = harness.unpacked_inputs(case.published["vocab_size"])
    got = harness.forward(ranks, case, layout, inputs, root / f"{case}-{layout}")
    harness.assert_close(got, harness.expected(case, packed=False), case, layout)


@pytest.mark.parametrize(("case", "layout"), harness.cases_and_layouts(packed=True))
def test_packed(ranks: Ranks, case: harness.Case, layout: str, root: Path) -> None:
    inputs = harness.packed_inputs(case.published["vocab_size"])
    got = harness.forward(ranks, case, layout, inputs, root / f"{case}-{layout}-packed")
    harness.assert_close(got, harness.expected(case, packed=True), case, layout)
