"""Attention on NVIDIA GPUs: torch's fused kernels in half precision, the reference in single precision."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from hardware.kernels.attention import ReferenceAttention, varlen_attention

HALF = (torch.bfloat16, torch.float16)


class NvidiaAttention(ReferenceAttention):
    """Rows of equal length by the reference (torch picks its fused kernel), documents by the flash kernel."""

    def varlen(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: Optional[float] = None,
    ) -> Tensor:
        if not _flash_takes(q_THD, v_TKD):
            return varlen_attention(q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, scale)
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and later

        cu = cu_seqlens.to(q_THD.device, non_blocking=True)
        return varlen_attn(q_THD, k_TKD, v_TKD, cu, cu, max_seqlen, max_seqlen, scale=scale, window_size=(-1, 0))


def _flash_takes(q_THD: Tensor, v_TKD: Tensor) -> bool:
    """The kernel's limits: half precision, and heads of one width, a multiple of 8 up to 256."""
    width = q_THD.shape[-1]
    return q_THD.dtype in HALF and width % 8 == 0 and width <= 256 and v_TKD.shape[-1] == width
