"""Our attention inside transformers' models: causal for rows that are one document, by documents for packed rows."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from engine.backends.native.sparse import bounds_of
from engine.data.batch import Batch
from hardware.kernels.attention import Attention
from hardware.kernels.sparse_attention import SparseAttention

# transformers builds a mask only for names that have a mask function, and we give it none: no S x S mask exists.
NAME = "zooforge"


def register(attention: Attention, sparse: Optional[SparseAttention] = None) -> None:
    """Make `attention`, and `sparse` where keys are chosen, the implementation `NAME` of transformers' models here."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Where documents end differs from batch to batch; code compiled around it would be made anew for each.
    varlen = torch.compiler.disable(attention.varlen)
    masked = torch.compiler.disable(attention.causal)  # windows and sinks in plain torch are loops over blocks

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        scaling: Optional[float] = None,
        cu_seq_lens_q: Optional[Tensor] = None,
        max_length_q: Optional[int] = None,
        indices: Optional[Tensor] = None,
        sliding_window: Optional[int] = None,
        s_aux: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # Norms with fp32 weights leave queries and keys in fp32 under autocast; the value tells the compute dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if indices is not None:
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            bounds = bounds_of(indices, cu_seq_lens_q)
            out = sparse.attend(q, k, v, indices.flatten(0, 1), bounds, scaling)
            return out.unflatten(0, indices.shape[:2]), None
        window = sliding_window or getattr(module, "sliding_window", None)  # not every class hands its own on
        masks = {"window": window} if window else {}
        masks = masks if s_aux is None else {**masks, "sinks": s_aux}  # transformers' name for sinks
        if cu_seq_lens_q is None:
            causal = masked if masks else attention.causal
            return causal(query, key, value, scaling, **masks).transpose(1, 2), None
        rows = query.shape[0], query.shape[2]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        return varlen(q, k, v, cu_seq_lens_q, max_length_q, scaling, **masks).unflatten(0, rows), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


def sinks(model: nn.Module, attention: Attention) -> dict[str, str]:
    """What a run says of the kernel for attention with sinks, if the model has any."""
    has = any(getattr(module, "sinks", None) is not None for module in model.modules())
    return {"attention with sinks": getattr(attention, "sinks_by", "the hardware's own")} if has else {}


def inputs(batch: Batch) -> dict[str, Any]:
    """The keyword arguments of a transformers language model for a batch."""
    if batch.dense:  # the model's own positions serve, once for all rows
        return {"input_ids": batch.tokens_BS, "use_cache": False}
    return {
        "input_ids": batch.tokens_BS,
        "position_ids": batch.positions_BS,
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
        "use_cache": False,
    }
