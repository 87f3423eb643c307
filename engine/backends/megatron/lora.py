"""Adapters beside megatron-core's parallel linear layers.

Megatron keeps several published layers in one (queries, keys and values; gate and up). Each published layer has its own
pair A, B here, and the products are put where its rows are. Of a column-parallel layer every tensor-parallel rank holds
A whole and its own rows of B; of a row-parallel layer its own columns of A, and B whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad

from engine.backends.megatron.mla import ReplicatedLinear
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.state import global_name, published_blocks
from engine.checkpoint.weight_map import Block, Shape, WeightMap
from engine.errors import UserError
from engine.lora.names import last, linear_layers
from engine.schema import Lora


def attach(model: CausalLM, weight_map: WeightMap, settings: Lora) -> None:
    """Freeze a stage and give its linear layers adapters. `weight_map` is that of the frozen weights."""
    model.requires_grad_(False)
    targets = linear_layers(weight_map.adaptable, settings.targets)
    for local, module in list(model.named_modules()):
        if isinstance(module, tuple(KINDS)) and module.weight is not None:
            blocks = published_blocks(weight_map, global_name(model, f"{local}.weight"), module.weight)
            if wanted := [b for b in blocks if b.name.removesuffix(".weight") in targets]:
                kind = next(kind for layer, kind in KINDS.items() if isinstance(module, layer))
                module.adapter = kind(module, wanted, settings)
                module.register_forward_hook(_add)
    if model.pre_process:
        # Nothing below the first adapter has a gradient, and recomputing layers needs an input that has one.
        model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(torch.is_grad_enabled()))


def _add(module: Any, inputs: tuple[Tensor, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    return (output[0] + module.adapter(inputs[0]), *output[1:])


class Pair(nn.Module):
    """The adapter of one published layer: what this rank holds of A and B, and where that lies."""

    def __init__(self, down: Shape, up: Shape, like: nn.Parameter) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(like.new_empty(down))
        self.lora_B = nn.Parameter(like.new_empty(up))

    def place(self, which: str, blocks: Sequence[Block], sharded: int | None, layer: Any, partial: bool) -> None:
        """Mark a parameter: its blocks of published tensors, the dimension that is cut, and how gradients add up.

        `partial`: under sequence parallelism every rank has the gradient of its share of the tokens.
        """
        parameter = getattr(self, which)
        parameter.published_blocks = tuple(blocks)
        parameter.allreduce = getattr(layer.weight, "allreduce", True)
        # An expert's own adapters are nobody else's: never a copy of another tensor-parallel rank's.
        cut = sharded is not None or layer.is_expert
        set_tensor_model_parallel_attributes(parameter, cut, sharded or 0, 1)
        parameter.sequence_parallel = partial and layer.sequence_parallel and not layer.is_expert


class Adapter(nn.Module):
    """The adapters beside one of megatron-core's layers, by the last names of the published ones."""

    def __init__(self, layer: Any, blocks: Sequence[Block], settings: Lora) -> None:
        super().__init__()
        self._group, self._ranks = layer.tp_group, layer.tp_group.size()
        self._sequence_parallel = layer.sequence_parallel and self._ranks > 1
        if layer.is_expert and self._ranks > 1:
            raise UserError("task=lora: adapters of experts need parallelism.etp=1")
        self._scale, self._dropout = settings.alpha / settings.r, settings.dropout
        self._by_layer: dict[str, list[Block]] = {}
        for block in blocks:
            self._by_layer.setdefault(block.name.removesuffix(".weight"), []).append(block)

    def _pairs(self) -> list[Pair]:
        return [getattr(self, last(name)) for name in self._by_layer]

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self._dropout, self.training) if self._dropout else x


class ColumnAdapter(Adapter):
    """Beside a column-parallel layer: all of the input, or that of a share of the tokens; own rows of the output."""

    def __init__(self, layer: ColumnParallelLinear, blocks: Sequence[Block], settings: Lora) -> None:
        super().__init__(layer, blocks, settings)
        r, places, (rows, columns) = settings.r, [], layer.weight.shape
        for name, own in self._by_layer.items():
            pair = Pair((r, columns), (sum(b.extent[0] for b in own), r), layer.weight)
            down = Block(f"{name}.lora_A.weight", (r, columns), (0, 0), (r, columns), (0, 0))
            up, cursor = [], 0
            for b in own:
                shape = (b.shape[0], r)
                up.append(Block(f"{name}.lora_B.weight", shape, (b.offset[0], 0), (b.extent[0], r), (cursor, 0)))
                places += range(b.local_offset[0], b.local_offset[0] + b.extent[0])
                cursor += b.extent[0]
            pair.place("lora_A", [down], None, layer, partial=True)
            pair.place("lora_B", up, 0, layer, partial=False)
            self.add_module(last(name), pair)
        self._missing = len(places) < rows
        self._order: Tensor | None
        self.register_buffer("_order", None, persistent=False)
        if places != list(range(rows)):
            order = torch.full((rows,), len(places))  # rows without an adapter read a column of zeros
            order[torch.tensor(places)] = torch.arange(len(places))
            self._order = order.to(layer.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        pairs = self._pairs()
        inner = linear(self._dropped(x), torch.cat([pair.lora_A for pair in pairs]))
        if self._sequence_parallel:
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=self._group)
        elif self._ranks > 1:
            inner = copy_to_tensor_model_parallel_region(inner, group=self._group)
        parts = [linear(part, pair.lora_B) for part, pair in zip(inner.chunk(len(pairs), -1), pairs, strict=True)]
        output = torch.cat(parts, -1) * self._scale
        if self._order is None:
            return output
        return (pad(output, (0, 1)) if self._missing else output).index_select(-1, self._order)


class RowAdapter(Adapter):
    """Beside a row-parallel layer: own features of the input; the whole output, or that of a share of the tokens."""

    def __init__(self, layer: RowParallelLinear, blocks: Sequence[Block], settings: Lora) -> None:
        super().__init__(layer, blocks, settings)
        (block,) = blocks
        r, name, (rows, columns) = settings.r, block.name.removesuffix(".weight"), layer.weight.shape
        pair = Pair((r, columns), (rows, r), layer.weight)
        whole = (r, block.shape[1])
        down = Block(f"{name}.lora_A.weight", whole, (0, block.offset[1]), (r, columns), (0, 0))
        up = Block(f"{name}.lora_B.weight", (rows, r), (0, 0), (rows, r), (0, 0))
        pair.place("lora_A", [down], 1, layer, partial=False)
        pair.place("lora_B", [up], None, layer, partial=True)
        self.add_module(last(name), pair)

    def forward(self, x: Tensor) -> Tensor:
        (pair,) = self._pairs()
        inner = linear(self._dropped(x), pair.lora_A)
        if self._sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self._group)
        elif self._ranks > 1:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self._group)
        return linear(inner, pair.lora_B) * self._scale


class ReplicatedAdapter(Adapter):
    """Beside a layer that every rank has whole: all features of this rank's tokens, in and out."""

    def __init__(self, layer: ReplicatedLinear, blocks: Sequence[Block], settings: Lora) -> None:
        super().__init__(layer, blocks, settings)
        (block,) = blocks
        r, name, (rows, columns) = settings.r, block.name.removesuffix(".weight"), layer.weight.shape
        pair = Pair((r, columns), (rows, r), layer.weight)
        down = Block(f"{name}.lora_A.weight", (r, columns), (0, 0), (r, columns), (0, 0))
        up = Block(f"{name}.lora_B.weight", (rows, r), (0, 0), (rows, r), (0, 0))
        pair.place("lora_A", [down], None, layer, partial=True)
        pair.place("lora_B", [up], None, layer, partial=True)
        self.add_module(last(name), pair)

    def forward(self, x: Tensor) -> Tensor:
        (pair,) = self._pairs()
        return linear(linear(self._dropped(x), pair.lora_A), pair.lora_B) * self._scale


KINDS: dict[type, type[Adapter]] = {
    ColumnParallelLinear: ColumnAdapter,
    RowParallelLinear: RowAdapter,
    ReplicatedLinear: ReplicatedAdapter,
}
