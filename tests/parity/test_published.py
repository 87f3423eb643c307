"""Every published size: the weight map adds up to the published number of parameters, under the published names.

Numbers and names come from the two data files beside this one, which hold their sources; a size that they lack fails.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.family import family_names, load_dotted, load_family
from engine.metrics.flops import active_share
from tests.freezing import freeze
from tests.parity.published_models import megatron_elements
from tests.ranks import Ranks

HERE = Path(__file__).parent
ZOO = HERE.parent.parent / "zoo"
COUNTS: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "published_counts.yaml").read_text())
KEYS: dict[str, dict[str, list[str]]] = yaml.safe_load((HERE / "published_keys.yaml").read_text())
LLM = [name for name in family_names() if (ZOO / "llm" / name).is_dir()]
SIZES = [
    (name, file.stem)
    for name in LLM
    for file in sorted((ZOO / "llm" / name / "model").glob("*.yaml"))
    if not file.stem.startswith("tiny")
]


@cache
def sized(family: str, size: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A size's config and the shapes of its published tensors, without the layers that predict further tokens."""
    keys = yaml.safe_load((ZOO / "llm" / family / "model" / f"{size}.yaml").read_text())
    card = load_family(family).of(keys.get("model_type"))
    config = load_dotted(card.config)(**{"model_type": card.model_type} | keys)
    published = load_dotted(card.weights)(config).published
    further = re.compile(rf"(.*\.)?mtp(_layers)?\..*|model\.layers\.{config.num_hidden_layers}\..*")
    return config, {name: shape for name, shape in published.items() if not further.fullmatch(name)}


def pattern(name: str) -> str:
    """A tensor's name with its layer as {i} and its expert as {e}."""
    return re.sub(r"\bexperts\.\d+\.", "experts.{e}.", re.sub(r"\b(layers|h)\.\d+\.", r"\1.{i}.", name))


@pytest.mark.parametrize(("family", "size"), SIZES)
def test_parameters_are_as_many_as_published(family: str, size: str) -> None:
    expected = COUNTS[family][size]
    config, shapes = sized(family, size)
    numbers = {name: math.prod(shape) for name, shape in shapes.items()}
    assert sum(numbers.values()) == pytest.approx(expected["parameters"], rel=1e-3)
    routed = sum(n for name, n in numbers.items() if re.search(r"\.experts\.\d+\.", name))
    active = sum(numbers.values()) - routed * (1 - active_share(config))
    assert float(active) == pytest.approx(expected["active"], rel=1e-3)


@pytest.mark.parametrize("family", LLM)
def test_no_published_size_is_missing(family: str) -> None:
    assert {size for name, size in SIZES if name == family} == set(COUNTS[family])


@pytest.mark.parametrize("family", LLM)
def test_tensors_have_their_published_names(family: str) -> None:
    """No size has a name that nobody publishes, and together they have all names of their model_type."""
    found: dict[str, set[str]] = {}
    for size in (size for name, size in SIZES if name == family):
        config, shapes = sized(family, size)
        found.setdefault(config.model_type, set()).update(map(pattern, shapes))
    for model_type, names in found.items():
        assert names == set(KEYS[model_type]["names"]), model_type


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size"), SIZES)
def test_the_megatron_model_holds_every_published_element_once(
    ranks: Ranks, family: str, size: str, tmp_path: Path
) -> None:
    """Built whole on one rank, without memory: as many parameters as the weight map, which the tests above count."""
    config, shapes = sized(family, size)
    ways = ("moe.grouped=true",) if config.mixture() else ()  # all experts of a layer in one parameter
    frozen = freeze(tmp_path / "run", family, f"model={size}", "backend=megatron", "parallelism=single", *ways)
    (held,) = ranks.call(megatron_elements, 1, config=str(frozen))
    assert {name: held.get(name) for name in shapes} == {name: math.prod(shape) for name, shape in shapes.items()}
