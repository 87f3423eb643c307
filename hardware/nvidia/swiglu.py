"""silu(gate) * up and its gradient in one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hardware.kernels.gated_mlp import Swiglu

BLOCK = 2048


@triton.jit
def _forward(fused, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(fused + row * 2 * width + column, mask).to(tl.float32)
    up = tl.load(fused + row * 2 * width + width + column, mask).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up, mask)


@triton.jit
def _backward(fused, grad, product, grad_fused, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(fused + row * 2 * width + column, mask).to(tl.float32)
    up = tl.load(fused + row * 2 * width + width + column, mask).to(tl.float32)
    upstream = tl.load(grad + row * width + column, mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    act = gate * sigmoid
    tl.store(product + row * width + column, act * up, mask)
    tl.store(grad_fused + row * 2 * width + column, upstream * up * sigmoid * (1 + gate - act), mask)
    tl.store(grad_fused + row * 2 * width + width + column, upstream * act, mask)


@torch.library.custom_op("zooforge::swiglu", mutates_args=())
def swiglu(fused: Tensor) -> Tensor:
    """[T, 2F] -> [T, F]."""
    fused = fused.contiguous()
    rows, width = fused.shape[0], fused.shape[1] // 2
    out = fused.new_empty(rows, width)
    if rows:
        _forward[(rows, triton.cdiv(width, BLOCK))](fused, out, width, BLOCK=BLOCK, num_warps=8)
    return out


@swiglu.register_fake
def _(fused: Tensor) -> Tensor:
    return fused.new_empty(fused.shape[0], fused.shape[1] // 2)


@torch.library.custom_op("zooforge::swiglu_backward", mutates_args=())
def swiglu_backward(fused: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 2F] and the gradient [T, F] -> the product [T, F] and the gradient [T, 2F]."""
    fused, grad = fused.contiguous(), grad.contiguous()
    rows, width = grad.shape
    product, grad_fused = torch.empty_like(grad), torch.empty_like(fused)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _backward[grid](fused, grad, product, grad_fused, width, BLOCK=BLOCK, num_warps=8)
    return product, grad_fused


@swiglu_backward.register_fake
def _(fused: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad), torch.empty_like(fused)


KERNEL = Swiglu(swiglu, swiglu_backward)
