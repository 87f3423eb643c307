"""AdamW on bf16 weights that are one half of fp32 main weights: the bit layout, and the reference in torch.

A main weight is kept as the bf16 value that the model computes with and a signed 16-bit remainder, together its exact
32 bits: bits(main) = bits(weight) * 2^16 + remainder, as integers. The weight is then the main weight rounded to
nearest, and both with the two moments and a bf16 gradient take 14 bytes a parameter, 2 fewer than with a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class SplitAdamW(Protocol):
    """One update of tensors in place, all of them lists of equal length and equal shapes at each place."""

    def __call__(
        self,
        weights: Sequence[Tensor],
        remainders: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
        grad_scale: float,
    ) -> None:
        """`weights` bf16, `remainders` int16, `grads` bf16 or fp32, moments fp32.

        Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101). Gradients are multiplied by `grad_scale`
        first; `step` is this update's number, from 1.
        """


def split_main(main: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16 weight, int16 remainder) of fp32 main weights. Values that bf16 rounds to infinity are not supported."""
    bits = main.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight = high.to(torch.int16).view(torch.bfloat16)
    return weight, (bits - (high << 16)).to(torch.int16)


def join_main(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 main weights of both halves."""
    return ((weight.contiguous().view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


@torch.no_grad()
def split_adamw(
    weights: Sequence[Tensor],
    remainders: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
) -> None:
    """See `SplitAdamW`."""
    for weight, remainder, grad, exp_avg, exp_avg_sq in zip(
        weights, remainders, grads, exp_avgs, exp_avg_sqs, strict=True
    ):
        main, grad = join_main(weight, remainder), grad.float() * grad_scale
        exp_avg.lerp_(grad, 1 - betas[0])
        exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        root = (exp_avg_sq / (1 - betas[1] ** step)).sqrt_().add_(eps)
        main.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, root, value=-lr / (1 - betas[0] ** step))
        high, low = split_main(main)
        weight.copy_(high)
        remainder.copy_(low)
