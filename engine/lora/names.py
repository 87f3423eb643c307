"""Which linear layers get adapters, and what the adapters' tensors are called. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Optional

from engine.checkpoint.weight_map import Shape, WeightMap
from engine.errors import UserError
from engine.schema import Lora, Run

PREFIX = "base_model.model."  # before every name in PEFT's files
LINEAR = re.compile(r".*\b(layers|h)\.\d+\..*\.weight")
ROUTERS = ("gate", "shared_expert_gate")  # they choose and weigh experts, and get no adapters


def linear_layers(published: Mapping[str, Shape], targets: Optional[Sequence[str]]) -> dict[str, Shape]:
    """Published names of the adapted layers (without `.weight`) and the shapes [out, in] of their matrices.

    `targets` are last names; None means all linear layers. Raises UserError for one that the model does not have.
    """
    there = {
        name.removesuffix(".weight"): shape
        for name, shape in published.items()
        if LINEAR.fullmatch(name) and len(shape) == 2 and last(name.removesuffix(".weight")) not in ROUTERS
    }
    known = dict.fromkeys(last(module) for module in there)
    if targets is not None and not targets:
        raise UserError(f"task.lora.targets is empty; null adapts all linear layers: {', '.join(known)}")
    if unknown := [target for target in targets or () if target not in known]:
        raise UserError(
            f"task.lora.targets: the model has no linear layer called {', '.join(unknown)}; it has {', '.join(known)}"
        )
    wanted = known if targets is None else targets
    return {module: shape for module, shape in there.items() if last(module) in wanted}


def not_in_reference(weight_map: WeightMap, layers: Iterable[str]) -> list[str]:
    """Adapted layers that are no modules of the reference, which holds their weights together or under other names."""
    other = {name for rule in weight_map.native for name, _, _ in rule.rows(1)}
    return [layer for layer in layers if re.sub(r"(?<=\.)\d+(?=\.)", "{i}", f"{layer}.weight", count=1) in other]


def last(module: str) -> str:
    """The last part of a dotted name."""
    return module.rpartition(".")[2]


def adapter_shapes(layers: Mapping[str, Shape], r: int) -> dict[str, Shape]:
    """The adapters' tensors: A [r, in] and B [out, r] of every layer."""
    shapes: dict[str, Shape] = {}
    for module, (rows, columns) in layers.items():
        shapes[f"{module}.lora_A.weight"] = (r, columns)
        shapes[f"{module}.lora_B.weight"] = (rows, r)
    return shapes


def adapter_layers(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The layers that adapters belong to, and the shapes [out, in] of their matrices."""
    layers = dict.fromkeys(layer_of(name) for name in shapes)
    return {n: (shapes[f"{n}.lora_B.weight"][0], shapes[f"{n}.lora_A.weight"][1]) for n in layers}


def is_adapter_name(name: str) -> bool:
    """Whether a published name is that of an adapter's tensor."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def layer_of(name: str) -> str:
    """The layer that an adapter's tensor belongs to."""
    return name.removesuffix(".weight").rpartition(".")[0]


def trained_adapters(run: Run, mode: str) -> Optional[Lora]:
    """The settings of the adapters that a backend is to build in this mode, or None."""
    return run.task.lora if run.task.name == "lora" and mode == "train" else None


def with_adapters(weight_map: WeightMap, settings: Lora) -> WeightMap:
    """The weight map with the adapters' tensors among the published ones."""
    adapters = adapter_shapes(linear_layers(weight_map.adaptable, settings.targets), settings.r)
    return replace(weight_map, published={**weight_map.published, **adapters}, unlearned=frozenset())
