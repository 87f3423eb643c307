"""Causal attention of a document's last tokens to all of it, in plain torch and without a matrix of all scores.

Also what torch's fused attention lacks: sliding windows, and sinks in the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_SCORES = 1 << 24  # scores that are held at a time, over all heads: 64 MiB in fp32


class TailAttention(torch.autograd.Function):
    """Query i of n sees the first m - n + i + 1 of m keys: q [n, H, D], k [m, K, D], v [m, K, E] give [n, H, E].

    With a `window` it sees only that many, the last ones. `sinks` [H] are a score that each head has besides those of
    the keys, of a key whose value is zero (gpt-oss, arXiv 2508.10925, section 2.2).

    torch's fused attention aligns its causal mask with the first key, so that a mask of n x m would be needed here.
    This goes through the queries in blocks instead and keeps, as FlashAttention does (arXiv 2205.14135, algorithm 4 for
    the backward pass), the output and the logarithm of each query's sum, from which backward makes the scores again.
    Scores are at least fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_nHD: Tensor,
        k_mKD: Tensor,
        v_mKE: Tensor,
        scale: Optional[float] = None,
        window: Optional[int] = None,
        sinks_H: Optional[Tensor] = None,
    ) -> Tensor:
        scale = q_nHD.shape[-1] ** -0.5 if scale is None else scale
        q, k, v = _by_group(q_nHD, k_mKD.shape[1]), *(_exact(x).transpose(0, 1) for x in (k_mKD, v_mKE))
        sinks = None if sinks_H is None else _exact(sinks_H).view(*q.shape[:2], 1)
        out, lse = [], []
        for rows, keys in _blocks(q.shape, k.shape[1], window):
            scores = _scores(q[:, :, rows], k[:, keys], scale, window)
            lse.append(scores.logsumexp(-1) if sinks is None else scores.logsumexp(-1).logaddexp(sinks))
            out.append(_attend((scores - lse[-1][..., None]).exp_(), v[:, keys]))
        out_nHE = torch.cat(out, 2).permute(2, 0, 1, 3).flatten(1, 2).to(v_mKE.dtype)
        ctx.save_for_backward(q_nHD, k_mKD, v_mKE, out_nHE, torch.cat(lse, 2), sinks_H)
        ctx.scale, ctx.window = scale, window
        return out_nHE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nHE: Tensor) -> tuple[Optional[Tensor], ...]:
        q_nHD, k_mKD, v_mKE, out_nHE, lse, sinks_H = ctx.saved_tensors
        groups = k_mKD.shape[1]
        q, grad, out = (_by_group(x, groups) for x in (q_nHD, grad_nHE, out_nHE))
        k, v = (_exact(x).transpose(0, 1) for x in (k_mKD, v_mKE))
        delta = (grad * out).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys in _blocks(q.shape, k.shape[1], ctx.window):
            p = _scores(q[:, :, rows], k[:, keys], ctx.scale, ctx.window).sub_(lse[:, :, rows, None]).exp_()
            grad_v[:, keys] += p.flatten(1, 2).transpose(1, 2) @ grad[:, :, rows].flatten(1, 2)
            grad_p = _attend(grad[:, :, rows], v[:, keys].transpose(1, 2))
            grad_scores = p.mul_(grad_p.sub_(delta[:, :, rows])).mul_(ctx.scale)
            grad_q[:, :, rows] = _attend(grad_scores, k[:, keys])
            grad_k[:, keys] += grad_scores.flatten(1, 2).transpose(1, 2) @ q[:, :, rows].flatten(1, 2)
        grads = (grad_q.permute(2, 0, 1, 3).flatten(1, 2), grad_k.transpose(0, 1), grad_v.transpose(0, 1))
        grad_sinks = None
        if sinks_H is not None:  # its value is zero: all that it does is take probability from the keys
            p_sink = (_exact(sinks_H).view(*q.shape[:2], 1) - lse).exp()
            grad_sinks = -(p_sink * delta[..., 0]).sum(-1).flatten().to(sinks_H.dtype)
        inputs = (q_nHD, k_mKD, v_mKE)
        return *(g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)), None, None, grad_sinks


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _by_group(x_nHD: Tensor, groups: int) -> Tensor:
    """[K, H / K, n, D]: the queries of each key head together."""
    return _exact(x_nHD).unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _blocks(shape: torch.Size, keys: int, window: Optional[int]) -> Iterator[tuple[slice, slice]]:
    """Ranges of queries, and the keys that some of them see. `shape` is [K, H / K, n, D]."""
    queries = shape[2]
    seen = keys if window is None else min(keys, 2 * window)
    size = max(1, BLOCK_SCORES // max(1, shape[0] * shape[1] * seen))
    size = size if window is None else min(size, window)  # a longer block would mostly be masked
    for first in range(0, queries, size):
        last = min(first + size, queries)
        begin = 0 if window is None else max(0, keys - queries + first - window + 1)
        yield slice(first, last), slice(begin, keys - queries + last)


def _attend(p_KGnm: Tensor, v_KmE: Tensor) -> Tensor:
    """[K, G, n, E]: the product for every head, those of a group in one."""
    return (p_KGnm.flatten(1, 2) @ v_KmE).unflatten(1, p_KGnm.shape[1:3])


def _scores(q_KGnD: Tensor, k_KmD: Tensor, scale: float, window: Optional[int]) -> Tensor:
    """[K, G, n, m], minus infinity where a key is not seen by the query; the last query's place is the last key's."""
    scores = _attend(q_KGnD * scale, k_KmD.transpose(1, 2))
    n, m = scores.shape[-2:]
    later = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
    scores[..., -n:].masked_fill_(later, float("-inf"))
    if window is not None and m > window:
        scores.masked_fill_(torch.ones_like(scores[0, 0], dtype=torch.bool).tril(m - n - window), float("-inf"))
    return scores
