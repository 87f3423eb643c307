"""The global gradient norm, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def squared_norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares over all elements, a float64 scalar on `device`; 0 for no gradients.

    Sums of ranks that hold disjoint parts add up to the global squared norm. Tensors are summed in float64, since the
    square of a norm leaves the range of float32 long before the norm does.
    """
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(grads))).double().square().sum()


def clip_(grads: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of the global norm `norm` down to `max_norm`, in place; 0 leaves them as they are."""
    factor = max_norm / (norm + EPSILON)
    if max_norm > 0 and factor < 1 and grads:
        torch._foreach_mul_(list(grads), factor)
