"""Attention on NVIDIA GPUs: torch's fused kernels in half precision, the reference in single precision."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hardware.kernels.attention import ReferenceAttention, causal_attention, tails_attention, varlen_attention

HALF = (torch.bfloat16, torch.float16)


# cuDNN's kernel first: about 1.7 times the flash kernel's speed on Hopper.
ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class NvidiaAttention(ReferenceAttention):
    """Rows of equal length by torch's fused kernels, documents and windows by the flash kernel, sinks in torch."""

    sinks_by = "torch in blocks (the flash kernel has none)"

    def causal(
        self,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        scale: Optional[float] = None,
        window: Optional[int] = None,
        sinks: Optional[Tensor] = None,
    ) -> Tensor:
        rows, _, length, _ = q_BHSD.shape
        if sinks is not None:
            return causal_attention(q_BHSD, k_BKSD, v_BKSD, scale, window, sinks)
        if window is not None and window < length:  # torch's fused kernels have no window
            bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q_BHSD.device)
            documents = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSD, k_BKSD, v_BKSD))
            out = self.varlen(*documents, bounds, length, scale, window)
            return out.unflatten(0, (rows, length)).transpose(1, 2)
        with sdpa_kernel(ORDER, set_priority=True):
            return causal_attention(q_BHSD, k_BKSD, v_BKSD, scale)

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
        if sinks is not None or not _flash_takes(q_THD, v_TKD):
            return varlen_attention(q_THD, k_TKD, v_TKD, cu_seqlens, max_seqlen, scale, window, sinks)
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and later

        cu = cu_seqlens.to(q_THD.device, non_blocking=True)
        return varlen_attn(q_THD, k_TKD, v_TKD, cu, cu, max_seqlen, max_seqlen, scale=scale, window_size=_seen(window))

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
        if sinks is not None or not _flash_takes(q_THD, v_SKD):
            return tails_attention(q_THD, k_SKD, v_SKD, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, window, sinks)
        from torch.nn.attention.varlen import varlen_attn  # aligns its causal mask with the last key

        cu_q, cu_k = (cu.to(q_THD.device, non_blocking=True) for cu in (cu_seqlens_q, cu_seqlens_k))
        return varlen_attn(q_THD, k_SKD, v_SKD, cu_q, cu_k, max_q, max_k, scale=scale, window_size=_seen(window))


def _seen(window: Optional[int]) -> tuple[int, int]:
    """What the flash kernel calls its window: keys before the query's own, and after it."""
    return (-1 if window is None else window - 1), 0


def _flash_takes(q_THD: Tensor, v_TKD: Tensor) -> bool:
    """The kernel's limits: half precision, and heads of one width, a multiple of 8 up to 256."""
    width = q_THD.shape[-1]
    return q_THD.dtype in HALF and width % 8 == 0 and width <= 256 and v_TKD.shape[-1] == width
