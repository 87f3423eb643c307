"""Gathering and reducing shares of unequal length, which gloo does not do: what expert tensor parallelism exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor


def gathering(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """megatron-core's gather along the first dimension; unequal shares travel padded to the longest."""

    @wraps(original)
    def gather(x: Tensor, group: Any, output_split_sizes: Any = None, *more: Any, **kw: Any) -> Tensor:
        sizes = _sizes(output_split_sizes)
        if group.size() == 1 or sizes is None:
            return original(x, group, sizes, *more, **kw)
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: x.shape[0]] = x
        everyone = x.new_empty(group.size() * max(sizes), *x.shape[1:])
        dist.all_gather_into_tensor(everyone, padded, group=group)
        parts = everyone.split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def scattering(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """megatron-core's reduce-scatter along the first dimension; unequal shares are cut out of the whole sum."""

    @wraps(original)
    def scatter(x: Tensor, group: Any, input_split_sizes: Any = None, *more: Any, **kw: Any) -> Tensor:
        sizes = _sizes(input_split_sizes)
        if group.size() == 1 or sizes is None:
            return original(x, group, sizes, *more, **kw)
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole.split(sizes)[group.rank()].clone()

    return scatter


def _sizes(sizes: Any) -> Optional[list[int]]:
    return None if sizes is None else [int(size) for size in sizes]
