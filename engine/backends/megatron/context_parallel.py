"""Context parallelism: every rank of a group holds a share of a micro-batch's tokens.

The T tokens of all rows, one after another and padded, are cut into 2 * cp equal chunks; rank r holds chunks r and
2 * cp - 1 - r. A causal query's work grows with its place in its document, and so every rank gets as much for rows of
one document each, whatever their number (the pairing of ring attention, arXiv 2311.09431, section 3). Documents may
begin and end anywhere, also across chunks.

Everything but attention works token by token. For attention the keys and values of all tokens are gathered over the
group; each chunk of queries then sees one contiguous range of them. A layer keeps only its own share for the backward
pass and gathers the rest again, so the whole K and V of one layer are all that is ever held beyond 1 / cp of the
activations: T * K * (D + E) numbers on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class Chunk:
    """Queries of consecutive tokens and what they see."""

    queries: slice  # of this rank's tokens
    keys: slice  # of all tokens, from the beginning of the first query's document
    cu_seqlens_q: Tensor  # int32; for each document its queries here ...
    cu_seqlens_k: Tensor  # ... and its keys up to the last of them
    max_q: int
    max_k: int


def token_multiple(config: TransformerConfig) -> int:
    """What a micro-batch's tokens are padded to a multiple of: 2 chunks a rank, whose sum tp divides under sp."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size if config.sequence_parallel else 1
    return tp if cp == 1 else cp * math.lcm(2, tp)


def share(x: Tensor, cp: int, rank: int, dim: int = 0) -> Tensor:
    """A rank's tokens of all tokens (their number a multiple of 2 * cp) along `dim`."""
    chunks = x.chunk(2 * cp, dim)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]], dim)


def in_order(x_T: Tensor, cp: int) -> Tensor:
    """All tokens in their order from the ranks' shares one after another. The inverse of `share`."""
    chunks = x_T.unflatten(0, (cp, 2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def chunks(cu_seqlens: Tensor, cp: int, rank: int, device: torch.device) -> tuple[Chunk, ...]:
    """The two chunks of a rank. `cu_seqlens` are the boundaries of documents that cover all tokens, padding too."""
    bounds = cu_seqlens.unique().tolist()
    size = bounds[-1] // (2 * cp)
    places = enumerate((rank, 2 * cp - 1 - rank))
    return tuple(_chunk(bounds, local * size, place * size, size, device) for local, place in places)


def _chunk(bounds: list[int], local: int, first: int, size: int, device: torch.device) -> Chunk:
    begin = max(bound for bound in bounds if bound <= first)
    inner = [bound for bound in bounds if first < bound < first + size]
    queries, keys = [first, *inner, first + size], [begin, *inner, first + size]
    cu_q, cu_k = (torch.tensor([b - cu[0] for b in cu], dtype=torch.int32, device=device) for cu in (queries, keys))
    longest = (max(b - a for a, b in pairwise(cu)) for cu in (queries, keys))
    return Chunk(slice(local, local + size), slice(begin, first + size), cu_q, cu_k, *longest)


def attend(
    q_tHD: Tensor,
    k_tKD: Tensor,
    v_tKE: Tensor,
    parts: tuple[Chunk, ...],
    group: Any,
    tails: Callable[..., Tensor],
    scale: float | None = None,
) -> Tensor:
    """Attention of this rank's t tokens to all tokens, [t, H, E]. `tails` is a kernel like `Attention.tails`."""
    keys = Gathered(torch.cat([k_tKD.flatten(1), v_tKE.flatten(1)], dim=1), group)
    whole_TE = keys.gather()
    width = k_tKD[0].numel()
    k, v = whole_TE[:, :width].unflatten(1, k_tKD.shape[1:]), whole_TE[:, width:].unflatten(1, v_tKE.shape[1:])
    with keys.saved_as_places(whole_TE):
        bounds = [(p.cu_seqlens_q, p.cu_seqlens_k, p.max_q, p.max_k) for p in parts]
        asked = [(q_tHD[p.queries], k[p.keys], v[p.keys]) for p in parts]
        out = torch.cat([tails(*qkv, *where, scale) for qkv, where in zip(asked, bounds, strict=True)])
    return keys.needed_by(out)


class Gathered:
    """All ranks' rows of a tensor, held during forward and during backward but not between.

    Backward gathers at its beginning and forgets at its end, in autograd nodes that every rank has: what the kernels in
    between save differs from rank to rank and must not decide about collectives.
    """

    def __init__(self, own_tE: Tensor, group: Any) -> None:
        self.own_tE, self.group = own_tE.contiguous(), group
        self.whole_TE: Tensor | None = None  # during backward

    def gather(self) -> Tensor:
        """[T, E], in order. Collective; its gradient is reduced and scattered."""
        return _Gather.apply(self.own_tE, self)

    def needed_by(self, out: Tensor) -> Tensor:
        """`out`, whose backward pass begins with gathering again."""
        return _Again.apply(out, self)

    @contextmanager
    def saved_as_places(self, whole_TE: Tensor) -> Iterator[None]:
        """What is saved here for backward and lies in `whole_TE` is kept as a place in it."""
        storage = whole_TE.untyped_storage().data_ptr()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else self.whole_TE.as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            yield


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_tE: Tensor, gathered: Gathered) -> Tensor:
        ctx.gathered = gathered
        return all_tokens(own_tE, gathered.group)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None]:
        ctx.gathered.whole_TE = None
        group = ctx.gathered.group
        cp = group.size()
        by_rank = torch.cat([share(grad_TE, cp, rank) for rank in range(cp)])
        own = torch.empty_like(by_rank[: by_rank.shape[0] // cp])
        dist.reduce_scatter_tensor(own, by_rank, group=group)
        return own, None


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, gathered: Gathered) -> Tensor:
        ctx.gathered = gathered
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.gathered.whole_TE = all_tokens(ctx.gathered.own_tE.detach(), ctx.gathered.group)
        return grad, None


def all_tokens(x_t: Tensor, group: Any) -> Tensor:
    """All ranks' tokens in order, without a gradient. Collective."""
    cp = group.size()
    ranks = torch.empty(cp * x_t.shape[0], *x_t.shape[1:], dtype=x_t.dtype, device=x_t.device)
    dist.all_gather_into_tensor(ranks, x_t.contiguous(), group=group)
    return in_order(ranks, cp)
