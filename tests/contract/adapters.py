"""What Megatron adapters change, on any megatron-core and Python: also run by itself on the floor."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

from hardware.cpu.megatron import CpuMegatron
from hardware.kunlun.means import MeansBySums
from hardware.kunlun.megatron import KunlunMegatron
from hardware.megatron import Attribute, Everywhere, MegatronAdapter, resolve


class KunlunTable(KunlunMegatron):
    """The rows alone: the vendor's plugin, which comes before them, is tested with the fake runtime."""

    def apply(self) -> None:
        MegatronAdapter.apply(self)


def snapshot() -> dict[str, Any]:
    """Everything a rebinding could reach: globals and class members of megatron-core and torch, and functions' code."""
    seen: dict[str, Any] = {}
    names = [name for name in sys.modules if name.startswith("megatron.core") or name in ("torch", "torch.cuda")]
    names += ["torch.distributed.distributed_c10d", "torch.cuda.random"]
    for name in names:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            seen[f"{name}:{key}"] = (value, code_of(value))
            if isinstance(value, type) and value.__module__ == name:
                members = vars(value).items()
                seen |= {f"{name}:{key}.{member}": (v, code_of(v)) for member, v in members}
    seen |= {f"Tensor.{key}": (value, None) for key, value in vars(torch.Tensor).items()}
    return seen


def code_of(value: Any) -> Any:
    value = getattr(value, "__func__", value)
    return value.__code__ if isinstance(value, types.FunctionType) else None


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    same = {key for key in before if key in after and all(a is b for a, b in zip(before[key], after[key], strict=True))}
    return (set(before) | set(after)) - same


def check() -> None:
    """Every row of every adapter finds its target, is carried out once, leaves no copy, and is gone after `revert`."""
    for adapter in (CpuMegatron(), KunlunTable()):
        adapter.apply()  # imports
        adapter.revert()
        before = snapshot()
        targets = [row.target for row in adapter.table() if isinstance(row, (Attribute, Everywhere))]
        old = {target: resolve(target)[2] for target in targets}
        adapter.apply()
        applied = snapshot()
        assert targets and all(resolve(target)[2] is not old[target] for target in targets)
        type(adapter)().apply()
        assert changed(applied, snapshot()) == set(), "applied twice"
        for row in adapter.table():
            if isinstance(row, Everywhere):
                assert stale(old[row.target]) == [], row.target
            if isinstance(row, MeansBySums):
                modules = {key for key in changed(before, applied) if key.endswith(":torch")}
                assert "megatron.core.transformer.multi_token_prediction:torch" in modules, modules
        adapter.revert()
        assert changed(before, snapshot()) == set(), "not reverted"


def stale(value: Any) -> list[str]:
    """The names in all modules of the process that still mean `value`."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
    return [f"{m.__name__}:{name}" for m in modules for name, v in list(vars(m).items()) if v is value]
