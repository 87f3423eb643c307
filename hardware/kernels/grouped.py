"""Matrix products of groups of rows, each with a matrix of its own: what experts compute."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class GroupedMatmul(Protocol):
    """Rows sorted by group, times the group's matrix."""

    def __call__(self, x_TK: Tensor, w_GNK: Tensor, counts_G: Tensor) -> Tensor:
        """[T, N]: rows of group g times w[g] transposed; `counts_G` (int64) says how many rows each group has."""


def one_by_one(x_TK: Tensor, w_GNK: Tensor, counts_G: Tensor) -> Tensor:
    """The plain definition: a product for each group, in any dtype, on any device."""
    parts = x_TK.split(counts_G.tolist())
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, w_GNK, strict=True)])


def together(x_TK: Tensor, w_GNK: Tensor, counts_G: Tensor) -> Tensor:
    """torch's grouped product; what it does not take (other dtypes than bf16, unaligned widths) goes one by one."""
    bytes_aligned = all(size * x_TK.element_size() % 16 == 0 for size in w_GNK.shape[1:])
    if x_TK.dtype != torch.bfloat16 or not bytes_aligned or not x_TK.numel():
        return one_by_one(x_TK, w_GNK, counts_G)
    ends = counts_G.cumsum(0).to(torch.int32)
    return torch.nn.functional.grouped_mm(x_TK, w_GNK.transpose(1, 2), offs=ends)
