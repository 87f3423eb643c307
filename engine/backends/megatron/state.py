"""A stage's parameters as slices of published tensors, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from engine.backends.base import Slice, TensorSource
from engine.backends.megatron.boxes import boxes, position
from engine.backends.megatron.model import CausalLM
from engine.checkpoint.weight_map import Block, Shape, WeightMap


@dataclass(frozen=True)
class Entry:
    """A parameter of this rank and where its elements live in published tensors."""

    name: str  # Megatron's, with the global layer index
    parameter: torch.nn.Parameter
    blocks: tuple[Block, ...]
    copies: bool  # another pipeline stage or tensor-parallel rank answers for it
    owner: int  # the rank in `replicas()` that answers for it where all of them hold it whole


def replicas() -> Any:
    """The group of ranks that hold the same parameters: data- and context-parallel ones."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def entries(chunks: Sequence[CausalLM], weight_map: WeightMap) -> list[Entry]:
    """Every parameter of this rank, in the model's order. `chunks` are the virtual stages, or the only one."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    load = [0] * replicas().size()
    found = []
    held = [(chunk, *named) for chunk in chunks for named in chunk.named_parameters()]
    for model, local, parameter in held:
        name = global_name(model, local)
        blocks = tuple(weight_map.blocks(name, tuple(parameter.shape), tp_rank, tp_size))
        replicated = not getattr(parameter, "tensor_model_parallel", False)
        tied_copy = getattr(parameter, "shared", False)
        owner = load.index(min(load))
        load[owner] += parameter.numel()
        found.append(Entry(name, parameter, blocks, tied_copy or (replicated and tp_rank > 0), owner))
    return found


def global_name(model: CausalLM, local: str) -> str:
    """A parameter's name with the layer counted over all pipeline stages."""

    def count(match: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

    return re.sub(r"^decoder\.layers\.(\d+)\.", count, local)


@dataclass(frozen=True)
class Piece:
    """A rectangle of a published tensor and the view of a local one that holds it."""

    name: str
    shape: Shape
    offset: Shape
    view: Tensor


def pieces(entry: Entry, flat: Tensor, start: int) -> Iterator[Piece]:
    """What `flat`, the parameter's elements from `start` on, holds of published tensors. Padding is in none."""
    for offset, extent in boxes(start, start + flat.numel(), tuple(entry.parameter.shape)):
        first = position(offset, tuple(entry.parameter.shape)) - start
        box = flat[first : first + math.prod(extent)].view(extent)
        for block in entry.blocks:
            low = tuple(map(max, offset, block.local_offset))
            high = tuple(
                min(a + d, b + e) for a, d, b, e in zip(offset, extent, block.local_offset, block.extent, strict=True)
            )
            if all(a < b for a, b in zip(low, high, strict=True)):
                inside = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
                published = tuple(
                    a - local + there for a, local, there in zip(low, block.local_offset, block.offset, strict=True)
                )
                yield Piece(block.name, block.shape, published, box[inside])


def slices(kind: str, entry: Entry, flat: Tensor, start: int) -> Iterator[Slice]:
    """The slices of what `flat` holds."""
    for piece in pieces(entry, flat, start):
        yield Slice(kind, piece.name, piece.shape, piece.offset, piece.view.contiguous())


def fill(kind: str, entry: Entry, flat: Tensor, start: int, source: TensorSource) -> None:
    """Read `flat` from a source; padding becomes zero."""
    flat.zero_()
    for piece in pieces(entry, flat, start):
        extent = tuple(piece.view.shape)
        piece.view.copy_(source.read(kind, piece.name, piece.shape, piece.offset, extent))
