"""How a Megatron parameter, on any tensor-parallel rank, is made of rectangular blocks of published tensors.

Free of torch: it knows names and numbers only. Everything that crosses between a model and the published layout goes
through it: Hugging Face directories, sharded checkpoints, optimizer state and the gradients of `job=forward`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """`local[local_offset : local_offset + extent]` is `published[name][offset : offset + extent]` per dimension."""

    name: str
    shape: Shape  # of the whole published tensor
    offset: Shape
    extent: Shape
    local_offset: Shape


# A run of whole rows of one published tensor: (published name, first row, number of rows).
Rows = tuple[str, int, int]


@dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter.

    `megatron` and the names inside `rows` may hold `{i}`, the global layer index. `rows(tp)` lists, in order, the row
    runs whose concatenation is the parameter gathered over all tensor-parallel ranks; it depends on `tp` only where
    Megatron interleaves by rank (gate and up).
    `shard` is "rows" (column-parallel and vocabulary-parallel: a rank holds a contiguous share of the concatenation),
    "columns" (row-parallel: a rank holds a share of dimension 1) or "whole" (replicated).
    A vocabulary-parallel parameter may have more rows than the concatenation: padding at the end, owned by nobody.
    """

    megatron: str
    rows: Callable[[int], list[Rows]]
    shard: str = "whole"


@dataclass(frozen=True)
class WeightMap:
    """A family's published tensors and the rules that place them in a Megatron model."""

    published: dict[str, Shape]  # what a published checkpoint stores, tied tensors left out
    rules: tuple[Rule, ...]
    num_layers: int
    aliases: dict[
        str, str
    ]  # optional published names that only repeat another tensor: {"lm_head.weight": "model.embed_tokens.weight"}

    def blocks(self, megatron: str, local_shape: Shape, tp_rank: int = 0, tp_size: int = 1) -> list[Block]:
        """The blocks of the parameter `megatron` (global layer index in its name) on one tensor-parallel rank.

        Raises KeyError for a parameter that no rule knows.
        """
        rule, index = self._rule(megatron)
        runs = [(name.replace("{i}", index), start, count) for name, start, count in rule.rows(tp_size)]
        if rule.shard == "columns":
            return list(self._columns(runs, local_shape, tp_rank))
        first = tp_rank * local_shape[0] if rule.shard == "rows" else 0
        return list(self._rows(runs, local_shape, first))

    def _rule(self, megatron: str) -> tuple[Rule, str]:
        index = next(iter(re.findall(r"\.(\d+)\.", megatron)), "")
        generic = re.sub(r"\.\d+\.", ".{i}.", megatron, count=1)
        for rule in self.rules:
            if rule.megatron == generic:
                return rule, index
        raise KeyError(f"no rule of the weight map knows the Megatron parameter '{megatron}'")

    def _rows(self, runs: list[Rows], local_shape: Shape, first: int) -> Iterator[Block]:
        """Cut the rows [first, first + local rows) out of the concatenation of `runs`."""
        last, cursor = first + local_shape[0], 0
        for name, start, count in runs:
            low, high = max(first, cursor), min(last, cursor + count)
            if low < high:
                rest = self.published[name][1:]
                zeros = (0,) * len(rest)
                yield Block(
                    name=name,
                    shape=self.published[name],
                    offset=(start + low - cursor, *zeros),
                    extent=(high - low, *rest),
                    local_offset=(low - first, *zeros),
                )
            cursor += count

    def _columns(self, runs: list[Rows], local_shape: Shape, tp_rank: int) -> Iterator[Block]:
        """Every run in full height, and this rank's share of dimension 1."""
        cursor, width = 0, local_shape[1]
        for name, start, count in runs:
            yield Block(
                name=name,
                shape=self.published[name],
                offset=(start, tp_rank * width),
                extent=(count, width),
                local_offset=(cursor, 0),
            )
            cursor += count
