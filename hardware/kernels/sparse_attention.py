"""Attention to the keys that a lightning indexer chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): plain torch.

Shapes: T queries and S keys of all documents one after another; H heads of width D, values of width E; an indexer has
I heads of width W and one key for all of them. Document i has n queries and m >= n keys, by the boundaries `cu_q` and
`cu_k`; its query j sees the first m - n + j + 1 of its keys: all documents are whole, or a rank's last parts of them.

This is exact and differentiable everywhere. It holds the scores of one document at a time, n x m for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Optional, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from hardware.kernels.attention import document_lengths

NONE = -1  # a place among the chosen keys that no key has


@dataclass(frozen=True)
class Bounds:
    """Where the documents' queries and keys begin and end, int32 [documents + 1] each."""

    cu_q: Tensor
    cu_k: Tensor

    def documents(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each document that has queries."""
        query = key = 0
        for n, m in zip(document_lengths(self.cu_q), document_lengths(self.cu_k), strict=True):
            if n:
                yield slice(query, query + n), slice(key, key + m)
            query, key = query + n, key + m


class SparseAttention(Protocol):
    """What the operation `sparse_attention` of the kernel registry is."""

    def choose(self, q_TIW: Tensor, k_SW: Tensor, w_TI: Tensor, bounds: Bounds, topk: int) -> Tensor:
        """int32 [T, k]: the places among all S of the keys with the best index scores, `NONE` where fewer are seen."""

    def attend(
        self, q_THD: Tensor, k_SHD: Tensor, v_SHE: Tensor, chosen_Tk: Tensor, bounds: Bounds, scale: float
    ) -> Tensor:
        """[T, H, E]: attention to the chosen keys alone."""

    def indexer_loss(
        self,
        index: tuple[Tensor, Tensor, Tensor],
        q_THD: Tensor,
        k_SHD: Tensor,
        chosen_Tk: Optional[Tensor],
        bounds: Bounds,
        scale: float,
        over_heads: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """fp32 [T]: how far the index scores are from what attention does, see `divergence`."""


def index_scores(q_nIW: Tensor, k_mW: Tensor, w_nI: Tensor) -> Tensor:
    """fp32 [n, m]: sum over the indexer's heads of w relu(q k / sqrt(W)) / sqrt(I) (equation 1).

    The two roots are the published code's; they change no order.
    """
    heads, width = q_nIW.shape[1:]
    scores_nIm = torch.einsum("niw,mw->nim", q_nIW.float(), k_mW.float()) * width**-0.5
    weights = w_nI.float() * heads**-0.5
    return torch.matmul(weights.unsqueeze(1), scores_nIm.relu()).squeeze(1)


def unseen(n: int, m: int, device: torch.device) -> Tensor:
    """bool [n, m]: keys that come after a query."""
    return torch.ones(n, m, dtype=torch.bool, device=device).triu(m - n + 1)


def choose(q_TIW: Tensor, k_SW: Tensor, w_TI: Tensor, bounds: Bounds, topk: int) -> Tensor:
    """See `SparseAttention.choose`."""
    rows = []
    width = min(topk, max((keys.stop - keys.start for _, keys in bounds.documents()), default=1))
    with torch.no_grad():
        for queries, keys in bounds.documents():
            scores = index_scores(q_TIW[queries], k_SW[keys], w_TI[queries])
            scores = scores.masked_fill(unseen(*scores.shape, scores.device), float("-inf"))
            best = scores.topk(min(width, scores.shape[1]), dim=1)
            places = torch.where(best.values > float("-inf"), best.indices + keys.start, NONE)
            rows.append(pad(places.int(), (0, width - places.shape[1]), value=NONE))
    return torch.cat(rows) if rows else w_TI.new_empty(0, width, dtype=torch.int32)


def mask_of(chosen_nk: Tensor, keys: slice) -> Tensor:
    """bool [n, m]: which of a document's keys are chosen."""
    m = keys.stop - keys.start
    local = torch.where(chosen_nk >= 0, chosen_nk.long() - keys.start, m)  # NONE falls into a column that is cut off
    mask = torch.zeros(chosen_nk.shape[0], m + 1, dtype=torch.bool, device=chosen_nk.device)
    return mask.scatter_(1, local, True)[:, :m]


def attend(q_THD: Tensor, k_SHD: Tensor, v_SHE: Tensor, chosen_Tk: Tensor, bounds: Bounds, scale: float) -> Tensor:
    """See `SparseAttention.attend`."""
    out = []
    for queries, keys in bounds.documents():
        mask = mask_of(chosen_Tk[queries], keys)
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD[queries], k_SHD[keys], v_SHE[keys]))
        out.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(out) if out else q_THD.new_empty(0, q_THD.shape[1], v_SHE.shape[-1])


def divergence(
    index: tuple[Tensor, Tensor, Tensor],
    q_THD: Tensor,
    k_SHD: Tensor,
    chosen_Tk: Optional[Tensor],
    bounds: Bounds,
    scale: float,
    over_heads: Callable[[Tensor], Tensor],
) -> Tensor:
    """fp32 [T]: the Kullback-Leibler divergence of each query, D(p || softmax(index scores)).

    p are the attention probabilities, added up over the heads and divided by their sum (DeepSeek-V3.2, section 2.1.1).
    Over all keys that are seen (equation 3, dense warm-up), or with `chosen_Tk` over those alone (equation 4, sparse
    stage). The gradient flows to the `index` triple q, k, w of `index_scores` only. `over_heads` adds up over the ranks
    that share the heads.
    """
    iq, ik, iw = index
    out = []
    for queries, keys in bounds.documents():
        scores = index_scores(iq[queries], ik[keys], iw[queries])
        off = unseen(*scores.shape, scores.device)
        if chosen_Tk is not None:
            off = off | ~mask_of(chosen_Tk[queries], keys)
        with torch.no_grad():
            attention = torch.einsum("nhd,mhd->hnm", q_THD[queries].float(), k_SHD[keys].float()) * scale
            p = over_heads(attention.masked_fill(off, float("-inf")).softmax(-1).sum(0))
            p = p / p.sum(-1, keepdim=True)
        log_index = scores.masked_fill(off, float("-inf")).log_softmax(-1).masked_fill(off, 0.0)
        out.append((torch.special.xlogy(p, p) - p * log_index).sum(-1))
    return torch.cat(out) if out else iw.new_empty(0, dtype=torch.float32)


class ReferenceSparseAttention:
    """Plain torch: exact and differentiable everywhere."""

    choose = staticmethod(choose)
    attend = staticmethod(attend)
    indexer_loss = staticmethod(divergence)


REFERENCE = ReferenceSparseAttention()
