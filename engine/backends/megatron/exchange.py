"""Context parallelism by heads: a rank gives away some heads of its tokens and gets all tokens of its own heads.

For what goes through a document from its beginning and so needs all of it (DeepSpeed-Ulysses, arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.backends.megatron.context_parallel import in_order, share


def to_heads(x_tKC: Tensor, group: Any) -> Tensor:
    """[T, K / cp, C], all tokens in order, of this rank's t tokens of K heads. Collective, with a gradient."""
    return _Exchange.apply(x_tKC, group, True)


def to_tokens(x_TkC: Tensor, group: Any) -> Tensor:
    """The way back."""
    return _Exchange.apply(x_TkC, group, False)


class _Exchange(torch.autograd.Function):
    """A permutation over ranks: its gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, heads: bool) -> Tensor:
        ctx.group, ctx.heads = group, heads
        return (_to_heads if heads else _to_tokens)(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_to_tokens if ctx.heads else _to_heads)(grad, ctx.group), None, None


def _to_heads(x_tKC: Tensor, group: Any) -> Tensor:
    by_rank = x_tKC.unflatten(1, (group.size(), -1)).movedim(1, 0)
    return in_order(_all_to_all(by_rank, group).flatten(0, 1), group.size())


def _to_tokens(x_TkC: Tensor, group: Any) -> Tensor:
    by_rank = torch.stack([share(x_TkC, group.size(), rank) for rank in range(group.size())])
    return _all_to_all(by_rank, group).movedim(0, 1).flatten(1, 2)


def _all_to_all(by_rank: Tensor, group: Any) -> Tensor:
    """What every rank has for this one, one after another."""
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
