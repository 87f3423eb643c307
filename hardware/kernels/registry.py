"""Which implementation of an operation runs here: the best one that is installed, else the reference.

Torch-free: an offer names its code and is loaded when it is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Optional

from hardware.base import HardwareError


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation."""

    operation: str
    name: str
    target: str  # module:attribute
    priority: int  # the highest usable one is chosen; the reference has 0
    needs: tuple[str, ...] = ()  # packages
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    costs: str = ""  # of a reference: what running it in the place of a better one costs

    def obstacle(self, dtype: str) -> Optional[str]:
        """Why it cannot be used for this dtype here; None if it can."""
        if dtype not in self.dtypes:
            return f"does not compute in {dtype}"
        missing = [package for package in self.needs if find_spec(package) is None]
        return f"needs the package {' and '.join(missing)}" if missing else None

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module), attribute)


REFERENCES = {
    kernel.operation: kernel
    for kernel in (
        Kernel(
            "swiglu",
            "torch",
            "hardware.kernels.gated_mlp:REFERENCE",
            0,
            costs="each MLP reads and writes its inner projections several times",
        ),
        Kernel(
            "linear_cross_entropy",
            "torch",
            "hardware.kernels.linear_cross_entropy:linear_cross_entropy",
            0,
            costs="the loss holds the logits of a whole micro-batch in fp32",
        ),
        Kernel(
            "split_adamw",
            "torch",
            "hardware.kernels.adamw:split_adamw",
            0,
            costs="every update reads and writes weights and moments several times",
        ),
        Kernel(
            "sparse_attention",
            "torch",
            "hardware.kernels.sparse_attention:REFERENCE",
            0,
            costs="sparse attention scores every key that is seen and computes attention under a mask",
        ),
        Kernel(
            "gated_delta_rule",
            "torch",
            "hardware.kernels.delta_rule:REFERENCE",
            0,
            costs="DeltaNet layers hold every chunk's scores in fp32 and scan them one after another",
        ),
    )
}


@dataclass(frozen=True)
class Choice:
    """What was chosen for an operation, and why nothing better was."""

    kernel: Kernel
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.kernel.name + (f" ({'; '.join(self.passed_over)})" if self.passed_over else "")


def choose(operation: str, offers: Sequence[Kernel], dtype: str, strict: bool = False) -> Choice:
    """The usable offer of the highest priority, by name where priorities are equal.

    Raises HardwareError if `strict` and a better offer cannot be used, with what it needs.
    """
    ranked = sorted((k for k in offers if k.operation == operation), key=lambda k: (-k.priority, k.name))
    passed: list[str] = []
    for kernel in (*ranked, REFERENCES[operation]):
        obstacle = kernel.obstacle(dtype)
        if obstacle is None:
            break
        passed.append(f"{kernel.name} {obstacle}")
    if strict and passed:
        raise HardwareError(f"kernels.strict: {operation} would fall back to {kernel.name}: {'; '.join(passed)}")
    return Choice(kernel, tuple(passed))
