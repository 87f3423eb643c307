"""Causal attention over packed documents and over equal rows: the interface, and the reference in plain torch.

Shapes: T tokens of all documents one after another, B rows of S tokens, H query heads, K key/value heads (K divides H;
query head h reads key/value head h // (H / K)), D the head's width. The value's width may differ from the key's.

With a `window` a query sees only that many keys, its own token's among them. `sinks` [H] are a further score in the
softmax of each head, of a key whose value is zero. Both are keyword arguments that are left out where there are none,
so an implementation without them serves every model but those that have some.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, Optional, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from hardware.kernels.tail import TailAttention


class Attention(Protocol):
    """What `Hardware.attention()` returns."""

    sinks_by: str  # what computes attention with sinks, for a run to say

    def varlen(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: Optional[float] = None,
        window: Optional[int] = None,
        sinks: Optional[Tensor] = None,
    ) -> Tensor:
        """Causal attention inside each document, [T, H, D].

        `cu_seqlens` is int32 [documents + 1], 0 first and T last, on the tensors' device or on the CPU; `max_seqlen` is
        the longest document's length; `scale` is 1 / sqrt(D) unless given.
        """

    def causal(
        self,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        scale: Optional[float] = None,
        window: Optional[int] = None,
        sinks: Optional[Tensor] = None,
    ) -> Tensor:
        """Causal attention inside each row, [B, H, S, D]."""

    def tails(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        scale: Optional[float] = None,
        window: Optional[int] = None,
        sinks: Optional[Tensor] = None,
    ) -> Tensor:
        """Causal attention inside documents of which only the last tokens ask, [T, H, D].

        Document i has n queries and m >= n keys, by the boundaries `cu_seqlens_q` and `cu_seqlens_k`; its query j sees
        the first m - n + j + 1 keys. This is what a rank of context parallelism computes.
        """


# Boundaries are read once for each tensor of them, not once for each layer: on an accelerator every read is a wait.
_lengths: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def document_lengths(cu_seqlens: Tensor) -> list[int]:
    """Lengths of the documents between the boundaries `cu_seqlens` [documents + 1]."""
    if cu_seqlens.device.type == "cpu":
        return cu_seqlens.diff().tolist()
    version = -1 if cu_seqlens.is_inference() else cu_seqlens._version
    known = _lengths.get(cu_seqlens)
    if known is None or known[0] != version:
        known = _lengths[cu_seqlens] = (version, cu_seqlens.diff().tolist())
    return known[1]


def causal_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    scale: Optional[float] = None,
    window: Optional[int] = None,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    """Causal attention inside each row, [B, H, S, D]. No S x S mask is built.

    By torch's fused attention where it can, which has neither windows nor sinks.
    """
    if sinks is not None or (window is not None and window < q_BHSD.shape[2]):
        return _masked_rows(q_BHSD, k_BKSD, v_BKSD, scale, window, sinks)
    gqa = q_BHSD.shape[1] != k_BKSD.shape[1]
    return scaled_dot_product_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=True, scale=scale, enable_gqa=gqa)


def _masked_rows(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    scale: Optional[float],
    window: Optional[int],
    sinks: Optional[Tensor],
) -> Tensor:
    """Rows beside one another as further heads of one row."""
    rows, heads = q_BHSD.shape[:2]
    q, k, v = (x.permute(2, 0, 1, 3).flatten(1, 2) for x in (q_BHSD, k_BKSD, v_BKSD))
    out = TailAttention.apply(q, k, v, scale, window, None if sinks is None else sinks.repeat(rows))
    return out.unflatten(1, (rows, heads)).permute(1, 2, 0, 3)


def varlen_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: Optional[float] = None,
    window: Optional[int] = None,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    """Causal attention inside each document, [T, H, D]: one dense call for all documents of a length.

    `max_seqlen` is there for kernels that need it; this one does not. Raises RuntimeError if the documents' lengths do
    not add up to T.
    """
    lengths = document_lengths(cu_seqlens)
    members: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        members.setdefault(length, []).append(index)
    if len(members) == 1 and 0 not in members:  # equal documents lie in memory as rows do
        rows = (len(lengths), lengths[0])
        return _rows(*(x.unflatten(0, rows) for x in (q_THD, k_TKD, v_TKD)), scale, window, sinks).flatten(0, 1)
    documents = [x.split(lengths) for x in (q_THD, k_TKD, v_TKD)]
    out: list[Tensor] = [q_THD.new_empty(0, q_THD.shape[1], v_TKD.shape[-1])] * len(lengths)
    for length, indices in members.items():
        if length == 0:
            continue
        q, k, v = (torch.stack([x[i] for i in indices]) if len(indices) > 1 else x[indices[0]][None] for x in documents)
        for index, document in zip(indices, _rows(q, k, v, scale, window, sinks), strict=True):
            out[index] = document
    return torch.cat(out)


def _rows(q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, *how: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHD, k_BSKD, v_BSKD))
    return causal_attention(q, k, v, *how).transpose(1, 2)


def tails_attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    scale: Optional[float] = None,
    window: Optional[int] = None,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    """Causal attention inside documents of which only the last tokens ask, see `Attention.tails`.

    Runs of whole documents (as many queries as keys) go to `varlen_attention`, the others to `TailAttention`.
    """
    pairs = list(zip(document_lengths(cu_seqlens_q), document_lengths(cu_seqlens_k), strict=True))
    out, query, key = [], 0, 0
    for whole, run in groupby(pairs, key=lambda pair: pair[0] == pair[1]):
        for documents in [list(run)] if whole else [[pair] for pair in run]:
            queries, keys = (sum(lengths) for lengths in zip(*documents, strict=True))
            q, k, v = q_THD[query : query + queries], k_SKD[key : key + keys], v_SKD[key : key + keys]
            if whole:
                bounds = torch.tensor([0, *(n for n, _ in documents)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                out.append(varlen_attention(q, k, v, bounds, max_q, scale, window, sinks))
            elif queries:
                out.append(TailAttention.apply(q, k, v, scale, window, sinks))
            query, key = query + queries, key + keys
    return torch.cat(out)


class ReferenceAttention:
    """Plain torch: exact and differentiable everywhere."""

    sinks_by = "torch in blocks"

    varlen = staticmethod(varlen_attention)
    causal = staticmethod(causal_attention)
    tails = staticmethod(tails_attention)
