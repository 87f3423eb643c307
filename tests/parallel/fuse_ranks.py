"""Training with compiled layers, a loss without logits and torch's fused AdamW, on a machine that has none of them.

Layers are compiled down to torch's own operations (`aot_eager`), and the loss is the reference of its operation: what
is shown is that they are in the right places. Everything computes in fp32, where a mistake cannot hide in rounding.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters

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
    counters.clear()
    with (
        mock.patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}),  # the rank processes do without
        mock.patch.object(Cpu, "supports", lambda _, what: what in ("compile", "fused_adamw")),
        mock.patch.object(fuse, "compile_method", compile_method),
        mock.patch.object(fuse, "fuse", without_logits),
    ):
        curve, state, _ = megatron_ranks.train(plan, **arguments)
    torch.compiler.reset()
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    return curve, state, compiled


def chosen(cp: int, sources: tuple[str, ...]) -> dict[str, str]:
    """The operations that a bf16 run of no layers is given."""
    run = megatron_ranks.Plan({"cp": cp}, precision="bf16").run()
    with mock.patch.object(fuse, "source_names", lambda _: sources):
        return fuse.fuse(run, Cpu(), [])
