"""A model's parameters by part, trained and frozen: what a run says before its first step. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from engine.metrics.text import count


def part_of(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `model.layers.self_attn`; layers count together."""
    parts = name.split(".")[:-1]
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return ".".join(parts)
    layer, rest = parts[: numbers[0]], [part for part in parts[numbers[0] + 1 :] if not part.isdigit()]
    depth = 2 if len(rest) > 1 and rest[1] == "experts" else 1
    return ".".join([*layer, *rest[:depth]])


def by_part(published: Mapping[str, tuple[int, ...]], trained: Callable[[str], bool]) -> dict[str, tuple[int, int]]:
    """(trained, frozen) elements of each part, in the order of the tensors."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in published.items():
        now, frozen = found.get(part_of(name), (0, 0))
        size = math.prod(shape)
        found[part_of(name)] = (now + size, frozen) if trained(name) else (now, frozen + size)
    return found


def table(parts: Mapping[str, tuple[int, int]]) -> str:
    """Lines for people: a part each, and the sum."""
    total = (sum(t for t, _ in parts.values()), sum(f for _, f in parts.values()))
    rows = [*parts.items(), ("all", total)]
    width = max(len(name) for name, _ in rows)
    head = f"{'parameters':<{width}}  {'trained':>8}  {'frozen':>8}"
    lines = [f"{name:<{width}}  {_shown(t):>8}  {_shown(f):>8}" for name, (t, f) in rows]
    return "\n".join([head, *lines])


def _shown(number: int) -> str:
    return count(number) if number else "-"
