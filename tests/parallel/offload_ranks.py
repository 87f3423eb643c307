"""Training with an optimizer in host memory, on a machine that has no other.

megatron-core's offloading asks each parameter whether it is on a device, and gives those that are a copy on the host.
Here every tensor says that it is on one, except the copies, so that all that follows (gradients to the copies, updates
of the copies, weights back) runs as on a device. What is not shown: streams that overlap, and pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine import schema
from tests.parallel import megatron_ranks


@dataclass
class Plan(megatron_ranks.Plan):
    """A run whose optimizer is offloaded."""

    def run(self) -> schema.Run:
        run = super().run()
        run.optim.offload = True
        return run


@contextmanager
def two_memories() -> Iterator[list[Tensor]]:
    """Tensors are on a device unless they were copied to pinned memory; the copies that were made."""
    copies: list[Tensor] = []
    theirs = {name: Tensor.__dict__.get(name) for name in ("is_cuda", "pin_memory")}

    def pin_memory(tensor: Tensor) -> Tensor:
        copies.append(tensor)
        return tensor

    def is_cuda(tensor: Tensor) -> bool:
        return not any(tensor is copy for copy in copies)

    Tensor.is_cuda, Tensor.pin_memory = property(is_cuda), pin_memory
    try:
        yield copies
    finally:
        for name, value in theirs.items():
            delattr(Tensor, name) if value is None else setattr(Tensor, name, value)


def train(plan: megatron_ranks.Plan, **arguments: Any) -> Any:
    """`megatron_ranks.train`, and how many parameters had a copy on the host."""
    build = megatron_ranks.build
    made = 0

    def build_with_copies(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        with two_memories() as copies:
            backend = build(*args, **kwargs)
            made = len(copies)
        return backend

    megatron_ranks.build = build_with_copies
    try:
        return *megatron_ranks.train(plan, **arguments)[:2], made
    finally:
        megatron_ranks.build = build


def several(calls: list[tuple[Any, dict[str, Any]]]) -> list[Any]:
    """These in one visit to the ranks."""
    values = [function(**arguments) for function, arguments in calls]
    torch.distributed.destroy_process_group()
    return values
