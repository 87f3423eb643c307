"""A family's plain config and its weight map against the reference classes."""

from __future__ import annotations

import dataclasses

import pytest

from engine.family import load_dotted, load_family
from engine.schema import MODEL_ONLY_KEYS
from tests import harness

FAMILIES = sorted({case.family for case, _ in harness.discover()})
# Published before transformers 5 under these names; the reference folds them into rope_parameters.
FOLDED = {"rope_theta", "rope_scaling"}


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_and_defaults_are_the_references(name: str) -> None:
    family = load_family(name)
    ours = {f.name: f.default for f in dataclasses.fields(load_dotted(family.config))}
    theirs = load_dotted(family.reference_config)()
    for key in ours.keys() - set(MODEL_ONLY_KEYS) - FOLDED:
        assert ours[key] == getattr(theirs, key), key
    assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(("case", "quick"), harness.discover(), ids=lambda x: str(x))
def test_published_tensors_are_the_references(case: harness.Case, quick: bool) -> None:
    family = load_family(case.family)
    keys = load_dotted(family.config)(**case.published)
    tied = set(load_dotted(family.weights)(keys).aliases)
    reference = {n: tuple(t.shape) for n, t in harness.reference_of(case).state_dict().items() if n not in tied}
    assert load_dotted(family.weights)(keys).published == reference


def test_what_the_controller_lets_through_is_what_transformers_has() -> None:
    """Names that its checks know, against the tables that the reference looks them up in."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from zoo.qwen3.check import ACTIVATIONS

    from engine.rope_scaling import KINDS

    assert set(ACT2FN) - set(ACTIVATIONS) == {"prelu", "xielu"}  # these two hold weights
    assert set(ACTIVATIONS) < set(ACT2FN)
    assert set(KINDS["native"]) - {"default"} == set(ROPE_INIT_FUNCTIONS) - {"proportional"}  # not a Qwen3's
