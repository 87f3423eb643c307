"""Means over ranks for a collective library that only sums."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from hardware.base import HardwareError
from hardware.megatron import Undo, loaded

AVG = "AVG"
COLLECTIVES = ("all_reduce", "reduce_scatter_tensor")
# megatron-core keeps this collective under a name of its own, by which gradients are reduced.
REDUCE_SCATTER = "megatron.core.distributed.param_and_grad_buffer:dist_reduce_scatter_func"


def by_sum(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective; asked for a mean it sums and divides the result, or what it is given if nobody waits here."""

    @wraps(collective)
    def call(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("op") != dist.ReduceOp.AVG:
            return collective(output, *args, **kwargs)
        kwargs["op"], ranks = dist.ReduceOp.SUM, dist.get_world_size(kwargs.get("group"))
        if kwargs.get("async_op"):
            (args[0] if args else output).div_(ranks)
            return collective(output, *args, **kwargs)
        done = collective(output, *args, **kwargs)
        output.div_(ranks)
        return done

    return call


class _Seen(types.ModuleType):
    """A module with some of its names changed."""

    def __init__(self, module: types.ModuleType, **changed: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        self.__dict__.update(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass(frozen=True)
class MeansBySums:
    """megatron-core's modules that ask for means see a `torch.distributed` that sums and divides."""

    reason: str

    def apply(self) -> Undo:
        found = [module for module in loaded() if vars(module).get("torch") is torch and _asks_for_means(module)]
        if not found:
            raise HardwareError("no megatron-core module asks for the mean over ranks that the adapter replaces")
        seen = _Seen(torch, distributed=_Seen(dist, **{name: by_sum(getattr(dist, name)) for name in COLLECTIVES}))
        for module in found:
            module.torch = seen

        def undo() -> None:
            for module in found:
                module.torch = torch

        return undo


def _asks_for_means(module: types.ModuleType) -> bool:
    return any(AVG in code.co_names for code in _codes(module, module.__name__))


def _codes(owner: Any, module: str) -> Iterator[types.CodeType]:
    """The code of an owner's functions and classes, nested ones included."""
    for value in list(vars(owner).values()):
        value = getattr(value, "__func__", value)
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, types.FunctionType):
            yield from _nested(value.__code__)
        elif isinstance(value, type):
            yield from _codes(value, module)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
