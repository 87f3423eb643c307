"""What a model family declares about itself, free of torch: `zoo.<family>.FAMILY`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.suggest import did_you_mean


@dataclass(frozen=True)
class Variant:
    """A further architecture of a family, published under a `model_type` of its own."""

    model_type: str
    config: str
    reference: str
    reference_config: str
    architecture: str | None = None


@dataclass(frozen=True)
class Family:
    """A family's card. Dotted names are `module:attribute` and are imported only by who needs them."""

    name: str  # the import name: zoo.<name>
    shelf: str  # llm | vlm | diffusion | embodied
    model_type: str  # in a published config.json
    config: str  # dataclass of the published config keys and their defaults, free of torch
    reference: str  # the reference implementation's model class
    reference_config: str
    weights: str  # function(config) -> engine.checkpoint.weight_map.WeightMap, free of torch
    megatron: str | None  # function(config, run) -> the Megatron model parts, see engine.backends.megatron
    tasks: tuple[str, ...]
    # Object of engine.backends.native.objective.Objective, for models that are no token decoders; None: the default
    native: str | None = None
    policy: str | None = None  # what engine.policy.runtime asks of a family of policies, its Serving
    inputs: str | None = None  # function(tensors, config, path) -> batch: what job=forward reads, with `native`
    data: str | None = None  # function as engine.data.loader.build_data, where it is not text that is learned
    check: str | None = None  # function(config, backend) -> lines that say what it cannot have, free of torch
    architecture: str | None = None  # the class that a published config.json names, where it is not the reference's
    # Published in FP8 by blocks: last names of matrices that are not; None: not published in FP8.
    fp8_keeps: tuple[str, ...] | None = None
    variants: tuple[Variant, ...] = ()  # architectures besides the one above, such as the MoE sizes of a dense family

    @property
    def model_types(self) -> tuple[str, ...]:
        """The published `model_type`s that this family reads."""
        return (self.model_type, *(variant.model_type for variant in self.variants))

    def of(self, model_type: str | None) -> Family:
        """The family's card for one of its architectures; None means this one."""
        for variant in self.variants:
            if variant.model_type == model_type:
                this = Variant(self.model_type, self.config, self.reference, self.reference_config, self.architecture)
                others = tuple(other for other in self.variants if other is not variant)
                return replace(self, **vars(variant), variants=(this, *others))
        return self


def load_dotted(dotted: str) -> Any:
    """Import `module:attribute`."""
    module, _, attribute = dotted.partition(":")
    return getattr(import_module(module), attribute)


def load_family(name: str) -> Family:
    """The card of `zoo.<name>`; a `UserError` if there is no such family."""
    try:
        return import_module(f"zoo.{name}").FAMILY
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != f"zoo.{name}":
            raise
        near = did_you_mean(name, family_names())
        raise UserError(f"'{name}' is not a model family{near} (`zoo list` shows them)") from None


def proven() -> dict[str, dict[str, Any]]:
    """What is proven of each family: the `parameters` of its published sizes, and by `layouts` the largest errors that
    its parity tests measured. `python -m tests.families_page` writes it; nothing of families of other packages.
    """
    file = Path(import_module("zoo").__file__ or "").parent / "families.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def family_names() -> list[str]:
    """The families that are there, shelf by shelf."""
    zoo = import_module("zoo")
    home = Path(zoo.__file__ or "").parent
    return [file.parent.name for shelf in zoo.SHELVES for file in sorted((home / shelf).glob("*/recipe.yaml"))]
