"""down(silu(gate(x)) * up(x)) with one matmul for both inner projections: the interface and a reference.

T tokens, H hidden size, F intermediate size. Backward keeps x and the projections' output [T, 2F] and computes the
product again, which is cheaper than to keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True)
class Swiglu:
    """silu(gate) * up of fused projections [T, 2F], gate first (Shazeer, arXiv 2002.05202)."""

    forward: Callable[[Tensor], Tensor]  # [T, 2F] -> [T, F]
    backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # [T, 2F], gradient [T, F] -> product, gradient [T, 2F]


def swiglu(fused_T2F: Tensor) -> Tensor:
    """The product in the projections' dtype."""
    gate, up = fused_T2F.float().chunk(2, -1)
    return (silu(gate) * up).to(fused_T2F.dtype)


def swiglu_backward(fused_T2F: Tensor, grad_TF: Tensor) -> tuple[Tensor, Tensor]:
    """(the product again, the gradient of both projections)."""
    gate, up = fused_T2F.float().chunk(2, -1)
    grad, sigmoid = grad_TF.float(), torch.sigmoid(gate)
    act = gate * sigmoid
    grad_gate = grad * up * sigmoid * (1 + gate - act)
    dtype = fused_T2F.dtype
    return (act * up).to(dtype), torch.cat([grad_gate, grad * act], -1).to(dtype)


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, kernel: Swiglu) -> Tensor:
        fused = x @ torch.cat([gate, up]).t()
        ctx.save_for_backward(x, fused, gate, up, down)
        ctx.kernel = kernel
        return kernel.forward(fused) @ down.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x, fused, gate, up, down = ctx.saved_tensors
        product, grad_fused = ctx.kernel.backward(fused, grad @ down)
        grad_weights = grad_fused.t() @ x
        grad_x = grad_fused @ torch.cat([gate, up])
        return grad_x, grad_weights[: len(gate)], grad_weights[len(gate) :], grad.t() @ product, None


def gated_mlp(x: Tensor, gate_FH: Tensor, up_FH: Tensor, down_HF: Tensor, kernel: Swiglu) -> Tensor:
    """[..., H] -> [..., H]. All of one dtype; weights as torch's Linear holds them."""
    return _GatedMLP.apply(x.reshape(-1, x.shape[-1]), gate_FH, up_FH, down_HF, kernel).view(x.shape)


REFERENCE = Swiglu(swiglu, swiglu_backward)
