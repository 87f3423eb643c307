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


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of the global norm `norm` are multiplied by so that it is at most `max_norm`; 0 never clips."""
    return min(1.0, max_norm / (norm + EPSILON)) if max_norm > 0 else 1.0
