"""Training with compiled layers, a loss without logits and torch's fused AdamW, on a machine that has none of them.

Layers are compiled down to torch's own operations (`aot_eager`), and the loss is the reference of its operation: what
is shown is that they are in the right places. Everything computes in fp32, where a mistake cannot hide in rounding.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from engine.backends.megatron import fuse
from hardware.cpu import Cpu
from hardware.kernels.linear_cross_entropy import linear_cross_entropy
from tests.parallel import megatron_ranks


class Plan(megatron_ranks.Plan):
    """A run that asks for compiled layers."""

    def run(self) -> Any:
        run = super().run()
        run.precision.compile = True
        return run


def train(plan: Plan, by_row: bool, **arguments: Any) -> tuple[Any, Any, int]:
    """`megatron_ranks.train`'s curve and state, and how many layers were compiled."""
    compiled = 0

    def compile_method(module: Any, name: str = "forward") -> None:
        nonlocal compiled
        compiled += 1
        setattr(module, name, torch.compile(getattr(module, name), backend="aot_eager"))

    def without_logits(run: Any, hardware: Any, chunks: Any) -> dict[str, str]:
        kernels = put_in(run, hardware, chunks)
        for chunk in chunks:
            chunk.linear_loss, chunk.loss_by_row = linear_cross_entropy, by_row
        return kernels

    put_in = fuse.fuse
    with (
        mock.patch.object(Cpu, "supports", lambda _, what: what in ("compile", "fused_adamw")),
        mock.patch.object(fuse, "compile_method", compile_method),
        mock.patch.object(fuse, "fuse", without_logits),
    ):
        curve, state, _ = megatron_ranks.train(plan, **arguments)
    torch.compiler.reset()
    return curve, state, compiled
