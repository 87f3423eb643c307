"""DeepSeek sparse attention inside transformers' models: their indexers choose by our kernel, document by document.

transformers gives its indexers a mask of all queries and keys; here a small object in its place says where documents
lie. What the indexers return are places among all tokens of the batch, which our attention function looks at.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn

from hardware.kernels.sparse_attention import Bounds, SparseAttention

KIND = "deepseek_sparse_attention"  # of a layer, in transformers


class DocumentMask:
    """Stands where transformers has a mask [B, 1, S, S], of which it takes parts and passes them on."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def __getitem__(self, _: Any) -> DocumentMask:
        return self


def attach(model: nn.Module, kernel: SparseAttention, pairs: bool) -> bool:
    """Put our choosing into a model's indexers, if any; `pairs`: their rotary pairs are neighbouring channels."""
    indexers = [module for module in model.modules() if hasattr(module, "indexer") and module.indexer is not None]
    for module in indexers:
        module.indexer.forward = partial(choose, module.indexer, kernel, pairs)
    if indexers:
        model.model.register_forward_pre_hook(_give_documents, with_kwargs=True)
    return bool(indexers)


def _give_documents(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    bounds = bounds_of(kwargs["input_ids"], kwargs.get("cu_seq_lens_q"))
    return args, kwargs | {"attention_mask": {KIND: DocumentMask(bounds)}}


def bounds_of(tokens_BS: Tensor, cu_seqlens: Optional[Tensor]) -> Bounds:
    """Packed documents, or rows that are one document each."""
    if cu_seqlens is None:
        rows, length = tokens_BS.shape[:2]
        cu_seqlens = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    return Bounds(cu_seqlens, cu_seqlens)


@torch.no_grad()
def choose(
    indexer: Any,
    kernel: SparseAttention,
    pairs: bool,
    hidden_BSH: Tensor,
    latent_BSR: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: DocumentMask,
    *_: Any,
    **__: Any,
) -> Tensor:
    """int32 [B, S, k]: the places of the chosen keys among all B * S tokens."""
    q = indexer.wq_b(latent_BSR).unflatten(-1, (indexer.n_heads, -1))
    k = indexer.k_norm(indexer.wk(hidden_BSH)).unsqueeze(2)
    q, k = (_rotated(x, angles, indexer.qk_rope_head_dim, pairs).flatten(0, 1) for x in (q, k))
    weights = indexer.weights_proj(hidden_BSH.to(indexer.weights_proj.weight.dtype)).flatten(0, 1)
    chosen = kernel.choose(q, k.squeeze(1), weights, mask.bounds, indexer.index_topk)
    return chosen.unflatten(0, hidden_BSH.shape[:2])


def _rotated(x_BSHW: Tensor, angles: tuple[Tensor, Tensor], rotary: int, pairs: bool) -> Tensor:
    """The first channels turned. Cosines and sines [B, S, rotary] repeat in their second halves."""
    turned, plain = x_BSHW[..., :rotary], x_BSHW[..., rotary:]
    cos, sin = (angle[..., : rotary // 2].unsqueeze(2) for angle in angles)
    first, second = (turned[..., 0::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, plain], -1)
