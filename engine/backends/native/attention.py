"""Our attention inside transformers' models: causal for rows that are one document, by documents for packed rows."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn

from engine.data.batch import Batch
from hardware.kernels.attention import Attention

# transformers builds a mask only for names that have a mask function, and we give it none: no S x S mask exists.
NAME = "zooforge"


def register(attention: Attention) -> None:
    """Make `attention` the implementation `NAME` of transformers' models in this process."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Where documents end differs from batch to batch; code compiled around it would be made anew for each.
    varlen = torch.compiler.disable(attention.varlen)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        scaling: Optional[float] = None,
        cu_seq_lens_q: Optional[Tensor] = None,
        max_length_q: Optional[int] = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # Norms with fp32 weights leave queries and keys in fp32 under autocast; the value tells the compute dtype.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if cu_seq_lens_q is None:
            return attention.causal(query, key, value, scaling).transpose(1, 2), None
        rows = query.shape[0], query.shape[2]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        return varlen(q, k, v, cu_seq_lens_q, max_length_q, scaling).unflatten(0, rows), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)


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
