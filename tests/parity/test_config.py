"""A family's plain config and its weight map against the reference classes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from engine.checkpoint.headers import read_folder
from engine.cli import prepare
from engine.errors import UserError
from engine.family import Family, load_dotted, load_family
from engine.schema import MODEL_ONLY_KEYS
from tests import harness, layouts

ARCHITECTURES = [
    pytest.param(load_family(name).of(model_type), id=model_type)
    for name in sorted({case.family for case, _ in harness.discover()})
    for model_type in load_family(name).model_types
]
# Published before transformers 5 under these names; the reference folds them into rope_parameters.
FOLDED = {"rope_theta", "rope_scaling"}
# Keys of every decoder here that some reference lacks, and what they then are.
ABSENT = {"attention_dropout": 0.0}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_keys_and_defaults_are_the_references(family: Family) -> None:
    fields = dataclasses.fields(load_dotted(family.config))
    ours = {f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in fields}
    made = load_dotted(family.config)()
    if own := layouts.LAYOUTS.get(family.model_type):
        assert {key: ours[key] for key in own.defaults} == own.defaults
        assert made.reference_keys().items() >= own.keys(own.defaults).items()
        return
    theirs = load_dotted(family.reference_config)()
    for key in ours.keys() - set(MODEL_ONLY_KEYS) - FOLDED:
        # A key that the reference derives when it is not published has no default there, or is derived here as well.
        expected = getattr(theirs, key, ABSENT.get(key))
        derived = made.derived().get(key) if hasattr(made, "derived") else None
        assert expected in (ours[key], getattr(made, key), derived), key
    if "rope_theta" in theirs.rope_parameters:  # else each kind of layer has its own, compared above
        assert ours["rope_theta"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(("case", "quick"), harness.discover(), ids=lambda x: str(x))
def test_published_tensors_are_the_references(case: harness.Case, quick: bool, tmp_path: Path) -> None:
    weight_map = load_dotted(case.card.weights)(load_dotted(case.card.config)(**case.published))
    saved = {n: info.shape for n, info in read_folder(harness.weights_directory(case, tmp_path)).items()}
    assert weight_map.published == saved


REFUSED = [
    (name, layout, said)
    for name in sorted({c.family for c, _ in harness.discover()})
    for layout, said in harness.refused(name).items()
]


@pytest.mark.parametrize(("family", "layout", "said"), REFUSED)
def test_layouts_that_an_architecture_does_not_allow(family: str, layout: str, said: str) -> None:
    backend, _, overrides = harness.LAYOUTS[layout]
    with pytest.raises(UserError, match=re.escape(said)):
        prepare(family, ["hardware=cpu", "launcher=print", f"backend={backend}", *overrides])
