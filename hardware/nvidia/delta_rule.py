"""Gated DeltaNet's operations by flash-linear-attention's kernels (written against 0.6; not run on a GPU yet)."""

from __future__ import annotations

from fla.modules.causal_conv1d import causal_conv1d
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from hardware.kernels.delta_rule import DeltaRule


def convolve(x_TC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor) -> Tensor:
    """See `hardware.kernels.delta_rule.DeltaRule`."""
    bounds, weight = cu_seqlens.to(x_TC.device).long(), weight_CW.to(x_TC.dtype).contiguous()
    return causal_conv1d(x_TC.unsqueeze(0), weight, activation="silu", cu_seqlens=bounds)[0].squeeze(0)


def attend(q_TKD: Tensor, k_TKD: Tensor, v_THE: Tensor, g_TH: Tensor, beta_TH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """See `hardware.kernels.delta_rule.DeltaRule`. Key heads are repeated: old releases want as many as value heads."""
    repeat, bounds = v_THE.shape[1] // k_TKD.shape[1], cu_seqlens.to(v_THE.device).long()
    q, k = (x.repeat_interleave(repeat, 1) for x in (q_TKD, k_TKD))
    one_row = (x.unsqueeze(0).contiguous() for x in (q, k, v_THE, g_TH.float(), beta_TH))
    out, _ = chunk_gated_delta_rule(*one_row, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)
    return out.squeeze(0)


KERNEL = DeltaRule(convolve, attend)
