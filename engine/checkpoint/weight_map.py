"""How a Megatron parameter, on any tensor-parallel rank, is made of rectangular blocks of published tensors.

Free of torch: it knows names and numbers only. Everything that crosses between a model and the published layout goes
through it: Hugging Face directories, sharded checkpoints, optimizer state and the gradients of `job=forward`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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

    `megatron` and the names inside `rows` may hold `{i}`, the global layer index, and `{e}`, the global index of an
    expert; a rule that names a layer outright stands before the one for all others. `rows(tp)` lists, in order, the row
    runs whose concatenation is the parameter gathered over all tensor-parallel ranks; it depends on `tp` only where
    Megatron interleaves by rank (gate and up).
    `shard` is "rows" (column-parallel and vocabulary-parallel: a rank holds a contiguous share of the concatenation),
    "columns" (row-parallel: a rank holds a share of dimension 1) or "whole" (replicated).
    A vocabulary-parallel parameter may have more rows than the concatenation: padding at the end, owned by nobody.
    """

    megatron: str
    rows: Callable[[int], list[Rows]]
    shard: str = "whole"
    shift: int = 0  # added to the number that takes the place of `{i}` in published names


@dataclass(frozen=True)
class WeightMap:
    """A family's published tensors and the rules that place them in a Megatron model."""

    published: dict[str, Shape]  # what a published checkpoint stores, tied tensors left out
    rules: tuple[Rule, ...]
    num_layers: int
    aliases: dict[
        str, str
    ]  # optional published names that only repeat another tensor: {"lm_head.weight": "model.embed_tokens.weight"}
    native: tuple[Rule, ...] = ()  # parameters that the reference holds in another form than it publishes them
    # Published tensors that no gradient moves, such as a router's correction bias: fp32 in every model and checkpoint
    # whatever the precision, without optimizer state, and whole on every tensor-parallel rank.
    buffers: frozenset[str] = frozenset()
    # Published tensors that the model's loss has no gradient of, such as an indexer's: parameters all the same
    unlearned: frozenset[str] = frozenset()
    # Published tensors of the layers for multi-token prediction, which the reference model does not have.
    predictors: frozenset[str] = frozenset()
    # Published tensors that no part of the model reads: carried along as they are.
    kept: frozenset[str] = frozenset()
    # Those of the unlearned that a forward pass does not read: adapters beside them would not learn either.
    idle: frozenset[str] = frozenset()
    # What to read in the place of a published tensor that a directory does not store, where it is another's copy.
    stand_ins: dict[str, str] = field(default_factory=dict)
    # Those of the aliases' names under which a matrix is stored with its rows and columns changed over.
    transposed: frozenset[str] = frozenset()

    @property
    def parameters(self) -> dict[str, Shape]:
        """The published tensors that are learnt by gradients."""
        return {name: shape for name, shape in self.published.items() if name not in self.buffers}

    @property
    def adaptable(self) -> dict[str, Shape]:
        """The published tensors that adapters may stand beside, if they are linear layers."""
        return {name: shape for name, shape in self.published.items() if name not in self.kept | self.idle}

    def blocks(self, megatron: str, local_shape: Shape, tp_rank: int = 0, tp_size: int = 1) -> list[Block]:
        """The blocks of the parameter `megatron` (global layer index in its name) on one tensor-parallel rank.

        Raises KeyError for a parameter that no rule knows.
        """
        rule, runs = self._runs(self.rules, megatron, tp_size)
        if rule.shard == "columns":
            return list(self._columns(runs, local_shape, tp_rank))
        first = tp_rank * local_shape[0] if rule.shard == "rows" else 0
        return list(self._rows(runs, local_shape, first))

    def native_blocks(self, name: str, shape: Shape, first: int) -> list[Block]:
        """The blocks of a share of one of the reference's parameters: the rows of `shape` that begin at `first`.

        A parameter of more than two dimensions counts as a matrix with the width of the published ones: experts that
        lie behind one another are rows that do.
        """
        if name in self.published:
            rest = shape[1:]
            zeros = (0,) * len(rest)
            whole = self.published[name]
            return [Block(name, whole, (first, *zeros), shape, (0, *zeros))] if 0 not in shape else []
        _, runs = self._runs(self.native, name, 1)
        return list(self._rows(runs, shape, first))

    def is_buffer(self, name: str) -> bool:
        """Whether one of the reference's tensors is published as a buffer."""
        try:
            return self._runs(self.native, name, 1)[1][0][0] in self.buffers
        except KeyError:
            return name in self.buffers

    def native_shape(self, name: str) -> Shape:
        """A parameter of the reference as the matrix that `native_blocks` speaks of. KeyError if no rule knows it."""
        if name in self.published:
            return self.published[name]
        return self._gathered(self.native, name, 1)

    def megatron_shape(self, name: str, tp_size: int = 1) -> Shape:
        """A Megatron parameter gathered over the tensor-parallel ranks. KeyError if no rule knows it."""
        return self._gathered(self.rules, name, tp_size)

    def _gathered(self, rules: tuple[Rule, ...], name: str, tp_size: int) -> Shape:
        _, runs = self._runs(rules, name, tp_size)
        return (sum(count for _, _, count in runs), *self.published[runs[0][0]][1:])

    def _runs(self, rules: tuple[Rule, ...], name: str, tp_size: int) -> tuple[Rule, list[Rows]]:
        """The rule of a parameter, and its row runs with the indices filled in."""
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
        generic = name
        for mark in ("{i}", "{e}")[: len(numbers)]:
            generic = re.sub(r"(?<=\.)\d+(?=\.)", mark, generic, count=1)
        layer, expert = [*numbers, "", ""][:2]
        for rule in rules:
            if rule.megatron in (name, generic):
                runs = rule.rows(tp_size)
                layer = str(int(layer) + rule.shift) if layer else layer
                return rule, [
                    (n.replace("{i}", layer).replace("{e}", expert), start, count) for n, start, count in runs
                ]
        raise KeyError(f"no rule of the weight map knows the parameter '{name}'")

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
