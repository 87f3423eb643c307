"""silu(gate) * up by the operators of XPyTorch.

Their arguments are those of Baidu's public code: the input, the axis that holds both halves, whether the first half is
the gate, and where the result goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hardware.kernels.gated_mlp import Swiglu

AXIS, GATE_FIRST = -1, True


def forward(fused_T2F: Tensor) -> Tensor:
    """The product [T, F]."""
    out = fused_T2F.new_empty(*fused_T2F.shape[:-1], fused_T2F.shape[-1] // 2)
    if out.numel():  # the operator does not take an empty input
        torch.ops.custom_ops.swiglu_forward(fused_T2F.contiguous(), AXIS, GATE_FIRST, out=out)
    return out


def backward(fused_T2F: Tensor, grad_TF: Tensor) -> tuple[Tensor, Tensor]:
    """(the product again, the gradient of both projections [T, 2F])."""
    fused = fused_T2F.contiguous()
    grad = torch.empty_like(fused)
    if grad.numel():
        torch.ops.custom_ops.swiglu_backward(fused, grad_TF.contiguous(), AXIS, GATE_FIRST, dx=grad)
    return forward(fused), grad


KERNEL = Swiglu(forward, backward)
