"""AdamW over the tensors that a rank holds, whatever the layout: torch's own update, its state there from the start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.optim.groups import Group, divided
from engine.schema import Optim

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101) on tensors of two and more dimensions.

    `tensors` are (whole shape, fp32 tensor) pairs; a tensor may be a rank's part of the whole. Gradients are read from
    `.grad`. Unlike torch's optimizers the state is there before the first step, so that a checkpoint can fill it.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[tuple[int, ...], Tensor]],
        config: Optim,
        fused: bool,
        groups: Sequence[Group] = (),
    ) -> None:
        """`groups`: that of each tensor, where some learn otherwise."""
        parts = divided(tensors, groups, config.weight_decay)
        made = [{"params": members, "weight_decay": decay} for members, decay, _ in parts]
        self._scales = [scale for *_, scale in parts] or [1.0]
        self._torch = torch.optim.AdamW(
            made or [{"params": [torch.zeros(0)]}],
            lr=config.lr,
            betas=tuple(config.betas),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=fused,
            foreach=not fused,
        )
        self._steps: list[Tensor] = []
        for _, tensor in tensors:
            step = torch.zeros((), dtype=torch.float32, device=tensor.device if fused else "cpu")
            self._torch.state[tensor] = {"step": step} | {kind: torch.zeros_like(tensor) for kind in MOMENTS}
            self._steps.append(step)
        self.updates = 0

    def moment(self, kind: str, tensor: Tensor) -> Tensor:
        """`exp_avg` or `exp_avg_sq` of one of the tensors, in its shape."""
        return self._torch.state[tensor][kind]

    def main(self, tensor: Tensor) -> Tensor:
        """The fp32 values of one of the tensors: itself."""
        return tensor.detach()

    @torch.no_grad()
    def set_main(self, tensor: Tensor, values: Tensor) -> None:
        """Fill one of the tensors."""
        tensor.copy_(values)

    def update(self, grads: dict[Tensor, Tensor], lr: float, grad_scale: float) -> None:
        """One update of every tensor that has a gradient, which is multiplied by `grad_scale` first, in place."""
        if grad_scale != 1 and grads:
            torch._foreach_mul_(list(grads.values()), grad_scale)
        for tensor, grad in grads.items():
            tensor.grad = grad
        self.step(lr)
        for tensor in grads:
            tensor.grad = None

    def step(self, lr: float) -> None:
        """One update at the learning rate `lr`, with the tensors' own gradients."""
        for group, scale in zip(self._torch.param_groups, self._scales, strict=True):
            group["lr"] = lr * scale
        self._torch.step()
        self.updates += 1

    def set_updates(self, count: int) -> None:
        """Continue as after `count` updates."""
        self.updates = count
        for step in self._steps:
            step.fill_(count)
