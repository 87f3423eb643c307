"""The reference model from a family's published config: made without memory, then given memory part by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.backends.native.attention import NAME
from engine.backends.native.lora import published_name
from engine.backends.native.shards import Shard
from engine.checkpoint.weight_map import WeightMap
from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.moe.bias import is_trained


def reference_config(family: Family, config: Any) -> Any:
    """The reference's config object for a family's published config.

    transformers 5 keeps what was published as `rope_theta` and `rope_scaling` in one dictionary, `rope_parameters`.
    """
    keys = config.reference_keys()
    if "rope_theta" in keys:
        scaling = dict(keys.pop("rope_scaling", None) or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        keys["rope_parameters"] = scaling | {"rope_theta": keys.pop("rope_theta")}
    return load_dotted(family.reference_config)(**keys)


def meta_model(family: Family, config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The reference model, its tensors without memory. UserError for what our attention does not do."""
    theirs = reference_config(family, config)
    if getattr(theirs, "attention_dropout", 0.0):
        raise UserError(
            f"model.attention_dropout={theirs.attention_dropout}: attention has no dropout here; 0 would be right"
        )
    with torch.device("meta"):
        return load_dotted(family.reference)._from_config(theirs, dtype=dtype, attn_implementation=NAME)


def layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, in order: the unit of sharding, recomputing and compiling."""
    names = model._no_split_modules
    return [module for module in model.modules() if type(module).__name__ in names]


class Memory:
    """Gives a module's parameters memory on a device, without values. Shared parameters stay shared."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def give(self, module: nn.Module) -> None:
        for owner, name, parameter in _parameters(module):
            if parameter.is_meta:
                if parameter not in self._made:
                    empty = torch.empty_like(parameter, device=self._device)
                    self._made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                owner._parameters[name] = self._made[parameter]


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter, a shared one at each of its places."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


def make_buffers(model: nn.Module, weight_map: WeightMap, device: torch.device, rank: int) -> list[Shard]:
    """Give the buffers that are published memory in fp32, and say who holds them; their values come with the weights.

    Also what is no buffer in the reference but a parameter without gradient: no strategy shall shard or round it.
    """
    shards: dict[str, Shard] = {}
    for prefix, module in list(model.named_modules()):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            whole = published_name(f"{prefix}.{name}")
            if tensor is None or not weight_map.is_buffer(whole):
                continue
            module._parameters.pop(name, None)
            buffer = torch.zeros(tensor.shape, dtype=torch.float32, device=device)
            module.register_buffer(name, buffer)
            where = (whole, tuple(buffer.shape), (0,) * buffer.dim(), buffer, buffer)
            shards[f"{prefix}.{name}"] = Shard(*where, owned=rank == 0, updated=False, buffer=True)
    for name, shard in shards.items():
        shard.trained = is_trained(model, name)
    return list(shards.values())


def kept_tensors(weight_map: WeightMap, device: torch.device, ranks: tuple[int, int]) -> list[Shard]:
    """Memory for the published tensors that the model has not: held as they are, each by one rank.

    Those that no model of the family has stay in host memory.
    """
    rank, count = ranks
    shards = []
    for index, name in enumerate(sorted(weight_map.predictors | weight_map.kept)):
        shape, owned = weight_map.published[name], index % count == rank
        place = torch.device("cpu") if name in weight_map.kept else device
        local = torch.zeros(shape if owned else (0, *shape[1:]), device=place)
        where = (name, shape, (0,) * len(shape), local, local)
        shards.append(Shard(*where, owned=owned, updated=False, buffer=True))
    return shards


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Give the other buffers, which no checkpoint holds (rotary frequencies), memory and the reference's own values."""
    for module in model.modules():
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        for name, buffer in buffers.items():
            module._buffers[name] = torch.full_like(buffer, torch.nan, device=device)
        if buffers:
            with torch.no_grad():
                model._init_weights(module)
            missed = [name for name in buffers if module._buffers[name].isnan().any()]
            if missed:
                raise RuntimeError(f"the reference does not initialise {missed} of {type(module).__name__}")


def recompute(model: nn.Module, what: str) -> None:
    """Drop activations and compute them again in the backward pass.

    "full": of every layer but its input. "selective": of every layer's attention, whose queries, keys and values
    take as much memory as the rest of the layer and little time. "none": nothing.
    """
    if what == "full":
        chosen = layers(model)
    elif what == "selective":
        kinds = ("Attention", "DeltaNet")
        chosen = [m for layer in layers(model) for m in layer.modules() if type(m).__name__.endswith(kinds)]
    else:
        chosen = []
    for module in chosen:
        _checkpoint(module)


def _checkpoint(module: nn.Module) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    module.forward = forward
