"""A stage's parameters as slices of published tensors, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core import parallel_state
from torch import Tensor

from engine.backends.base import Slice, TensorSource
from engine.backends.megatron.boxes import boxes
from engine.backends.megatron.model import CausalLM
from engine.checkpoint.checksums import position
from engine.checkpoint.weight_map import Block, Shape, WeightMap
from engine.moe.bias import is_trained, saved_buffers


@dataclass(frozen=True)
class Entry:
    """A parameter of this rank and where its elements live in published tensors."""

    name: str  # Megatron's, with the global layer index
    parameter: Tensor  # or a buffer in its published shape
    blocks: tuple[Block, ...]
    copies: bool  # another pipeline stage or tensor-parallel rank answers for it
    owner: int  # the rank in `group` that answers for it where all of them hold it whole
    group: Any  # the ranks that hold the same share of it
    buffer: bool = False  # fp32, without optimizer state
    trained: bool = True  # checkpoints of a training run hold it


def replicas(parameter: Tensor) -> Any:
    """The group of ranks that hold the same share of a parameter."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def entries(chunks: Sequence[CausalLM], weight_map: WeightMap) -> list[Entry]:
    """Every parameter of this rank, in the model's order, then the buffers that are published.

    `chunks` are the virtual stages, or the only one.
    """
    tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    load: dict[Any, list[int]] = {}
    found = []
    for model, local, parameter in ((chunk, *named) for chunk in chunks for named in chunk.named_parameters()):
        name = global_name(model, local)
        blocks = published_blocks(weight_map, name, parameter)
        replicated = not getattr(parameter, "tensor_model_parallel", False)
        tied_copy = getattr(parameter, "shared", False)
        group = replicas(parameter)
        sizes = load.setdefault(group, [0] * group.size())
        owner = sizes.index(min(sizes))
        sizes[owner] += parameter.numel()
        copies = tied_copy or (replicated and tp[0] > 0)
        unlearned = weight_map.unlearned | weight_map.predictors
        kept = parameter.requires_grad or all(block.name in unlearned for block in blocks)
        found.append(Entry(name, parameter, blocks, copies, owner, group, trained=kept))
    return found + [entry for chunk in chunks for entry in buffer_entries(chunk, weight_map, copies=tp[0] > 0)]


def buffer_entries(model: CausalLM, weight_map: WeightMap, copies: bool) -> Iterator[Entry]:
    """The buffers that are part of the model, such as a router's correction bias, in their published shapes."""
    for local, buffer in saved_buffers(model):
        name = global_name(model, local)
        whole = buffer.view(weight_map.megatron_shape(name))
        blocks, group = tuple(weight_map.blocks(name, tuple(whole.shape))), replicas(buffer)
        unlearned = weight_map.unlearned | weight_map.predictors
        kept = is_trained(model, local) or all(block.name in unlearned for block in blocks)
        yield Entry(name, whole, blocks, copies, 0, group, buffer=True, trained=kept)


def published_blocks(weight_map: WeightMap, name: str, parameter: Tensor) -> tuple[Block, ...]:
    """The blocks of a parameter on this rank: those that it says itself (adapters), or those of the weight map."""
    own: tuple[Block, ...] | None = getattr(parameter, "published_blocks", None)
    tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    return tuple(parameter_blocks(weight_map, name, parameter, tp)) if own is None else own


def parameter_blocks(weight_map: WeightMap, name: str, parameter: Tensor, tp: tuple[int, int]) -> Iterator[Block]:
    """The blocks of a parameter on this rank, that of an expert or of all its experts one after another."""
    shape = tuple(parameter.shape)
    if ".experts." not in name:
        yield from weight_map.blocks(name, shape, *tp)
        return
    tp = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    count = getattr(parameter, "local_experts", None)
    if count is None:
        yield from weight_map.blocks(name, shape, *tp)
        return
    prefix, _, weight = name.rpartition(".")
    rows, first = shape[0] // count, count * parallel_state.get_expert_model_parallel_rank()
    for local in range(count):
        single = f"{prefix}.local_experts.{first + local}.{GROUPED[weight]}"
        for block in weight_map.blocks(single, (rows, *shape[1:]), *tp):
            place, *rest = block.local_offset
            yield replace(block, local_offset=(local * rows + place, *rest))


GROUPED = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}


def global_name(model: CausalLM, local: str) -> str:
    """A parameter's name with layers and experts counted over all ranks."""

    def count(match: re.Match[str]) -> str:
        return f"decoder.layers.{model.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match[str]) -> str:
        config = model.config
        first = parallel_state.get_expert_model_parallel_rank() * (
            config.num_moe_experts // config.expert_model_parallel_size
        )
        return f".local_experts.{first + int(match[1])}."

    return re.sub(r"\.local_experts\.(\d+)\.", expert, re.sub(r"^decoder\.layers\.(\d+)\.", count, local))


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
