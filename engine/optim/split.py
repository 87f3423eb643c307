"""AdamW for a bf16 model whose fp32 main weights are kept as the bf16 weights and 16-bit remainders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.optim.adamw import MOMENTS
from engine.optim.groups import Group, divided
from engine.schema import Optim
from hardware.kernels.adamw import SplitAdamW, join_main, split_main


class MainWeights:
    """The same as `engine.optim.adamw.AdamW` does with fp32 tensors, for bf16 ones; see `hardware.kernels.adamw`.

    `tensors` are (whole shape, bf16 tensor) pairs. Gradients, bf16 or fp32, are given to `update`.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[tuple[int, ...], Tensor]],
        config: Optim,
        kernel: SplitAdamW,
        groups: Sequence[Group] = (),
    ) -> None:
        """`groups`: that of each tensor, where some learn otherwise."""
        self._config, self._kernel = config, kernel
        self._groups = divided(tensors, groups, config.weight_decay)
        self._remainder = {tensor: torch.zeros_like(tensor, dtype=torch.int16) for _, tensor in tensors}
        self._moments = {
            kind: {tensor: torch.zeros_like(tensor, dtype=torch.float32) for _, tensor in tensors} for kind in MOMENTS
        }
        self.updates = 0

    def main(self, tensor: Tensor) -> Tensor:
        """A copy of one tensor's main weights, fp32."""
        return join_main(tensor.detach(), self._remainder[tensor])

    @torch.no_grad()
    def set_main(self, tensor: Tensor, values: Tensor) -> None:
        """Fill one tensor, and its remainder, with fp32 main weights."""
        weight, remainder = split_main(values.to(tensor.device, torch.float32))
        tensor.copy_(weight)
        self._remainder[tensor].copy_(remainder)

    def moment(self, kind: str, tensor: Tensor) -> Tensor:
        """`exp_avg` or `exp_avg_sq` of one of the tensors, in its shape."""
        return self._moments[kind][tensor]

    def update(self, grads: dict[Tensor, Tensor], lr: float, grad_scale: float) -> None:
        """One update of every tensor that has a gradient; gradients are multiplied by `grad_scale` first."""
        self.updates += 1
        for members, weight_decay, scale in self._groups:
            there = [tensor for tensor in members if tensor in grads]
            self._kernel(
                there,
                [self._remainder[tensor] for tensor in there],
                [grads[tensor] for tensor in there],
                *([self._moments[kind][tensor] for tensor in there] for kind in MOMENTS),
                lr=lr * scale,
                betas=tuple(self._config.betas),
                eps=self._config.eps,
                weight_decay=weight_decay,
                step=self.updates,
                grad_scale=grad_scale,
            )

    def set_updates(self, count: int) -> None:
        """Continue as after `count` updates."""
        self.updates = count
