"""Layers with weights of their own for each robot: GR00T's category-specific linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, silu


class Robots:
    """Which rows of a batch are which robot's.

    The numbers are known on the host. So each robot's weights are read once for all its rows, where picking them by a
    tensor of numbers copies a matrix for every row.
    """

    def __init__(self, numbers: Sequence[int], device: torch.device) -> None:
        self.kinds = sorted(set(numbers))
        self._rows: list[Tensor] = []
        if len(self.kinds) > 1:
            rows = [[row for row, number in enumerate(numbers) if number == kind] for kind in self.kinds]
            self._rows = [torch.tensor(part, device=device) for part in rows]
            self._back = torch.cat(self._rows).argsort()

    def linear(self, x_BTI: Tensor, W: Tensor, b: Tensor) -> Tensor:
        """[B, T, O] from W [robots, I, O] and b [robots, O]."""
        if not self._rows:
            return x_BTI @ W[self.kinds[0]] + b[self.kinds[0]]
        parts = [x_BTI[rows] @ W[kind] + b[kind] for kind, rows in zip(self.kinds, self._rows, strict=True)]
        return torch.cat(parts)[self._back]


class CategorySpecificLinear(nn.Module):
    """W [robots, inner, outer], b [robots, outer]."""

    def __init__(self, robots: int, inner: int, outer: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(robots, inner, outer))
        self.b = nn.Parameter(torch.empty(robots, outer))

    def forward(self, x_BTI: Tensor, robots: Robots) -> Tensor:
        return robots.linear(x_BTI, self.W, self.b)


class CategorySpecificMLP(nn.Module):
    """Two such layers and a ReLU."""

    def __init__(self, robots: int, inner: int, hidden: int, outer: int) -> None:
        super().__init__()
        self.layer1 = CategorySpecificLinear(robots, inner, hidden)
        self.layer2 = CategorySpecificLinear(robots, hidden, outer)

    def forward(self, x_BTI: Tensor, robots: Robots) -> Tensor:
        return self.layer2(relu(self.layer1(x_BTI, robots)), robots)


class ActionEncoder(nn.Module):
    """Noisy actions [B, T, A] and the bucket of their time, int [B], to [B, T, width]."""

    def __init__(self, robots: int, actions: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.W1 = CategorySpecificLinear(robots, actions, width)
        self.W2 = CategorySpecificLinear(robots, 2 * width, width)
        self.W3 = CategorySpecificLinear(robots, width, width)

    def forward(self, actions_BTA: Tensor, bucket_B: Tensor, robots: Robots) -> Tensor:
        x = self.W1(actions_BTA, robots)
        told = sinusoids(bucket_B, self.width).to(x.dtype)[:, None].expand(-1, x.shape[1], -1)
        return self.W3(silu(self.W2(torch.cat([x, told], -1), robots)), robots)


def sinusoids(bucket_B: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of a bucket at 10000^(-i / half), fp32 [B, width]; `width` is even."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float32, device=bucket_B.device)
    phases = bucket_B.float()[:, None] * torch.exp(-steps * (math.log(10000.0) / half))
    return torch.cat([phases.sin(), phases.cos()], 1)
