"""A backend's modules under published names, found by the tensors that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os.path import commonprefix

from torch import nn


def watched(published: Iterable[str]) -> set[str]:
    """The modules worth watching: embeddings, layers, the parts of a layer that have parts, and final norms.

    `model.layers.0.self_attn.q_proj.weight` tells of `model.layers.0` and `model.layers.0.self_attn`. Heads are left
    out: they need not exist as a module with an output, and their outputs are the largest.
    """
    found: set[str] = set()
    for name in published:
        parts = name.split(".")[:-1]
        numbers = [place for place, part in enumerate(parts) if part.isdigit()]
        if numbers:
            layer, rest = parts[: numbers[0] + 1], parts[numbers[0] + 1 :]
            found.add(".".join(layer))
            if len(rest) > 1:
                found.add(".".join([*layer, rest[0]]))
        elif parts and "head" not in parts[-1]:
            found.add(".".join(parts))
    return found


def by_published_name(
    roots: Iterable[nn.Module], names: Mapping[int, Iterable[str]], wanted: set[str]
) -> dict[str, nn.Module]:
    """The outermost module that holds exactly the tensors below each wanted name.

    `names` gives the published names of a parameter, by its id.
    """
    found: dict[str, nn.Module] = {}
    for root in roots:
        for module in root.modules():
            held = [name for parameter in module.parameters() for name in names.get(id(parameter), ())]
            prefix = _prefix(held)
            if prefix in wanted and prefix not in found:
                found[prefix] = module
    return found


def _prefix(tensors: list[str]) -> str:
    """The module that all of these tensors lie in."""
    modules = [name.split(".")[:-1] for name in tensors]
    return ".".join(commonprefix(modules)) if modules else ""
