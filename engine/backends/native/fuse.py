"""Faster forms of what transformers' decoder layers do, put into a model before it is wrapped.

They are found by the names that transformers gives their parts (q_proj, gate_proj ...), whatever the family; parameters
keep their names, so weights and checkpoints do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hardware.kernels.gated_mlp import Swiglu, gated_mlp
from hardware.kernels.linear_cross_entropy import LinearCrossEntropy

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GATED_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass
class LossHead:
    """In the place of the last matrix's forward: the loss of the labels that were put here, instead of logits."""

    head: nn.Linear
    kernel: LinearCrossEntropy
    labels: Optional[Tensor] = None  # [B, S], shifted already
    by_row: bool = False  # the loss of each row, [B], instead of their sum

    def __call__(self, hidden_BSH: Tensor) -> Tensor:
        assert self.labels is not None
        if self.by_row:
            rows = zip(hidden_BSH, self.labels, strict=True)
            return torch.stack([self.kernel(hidden, self.head.weight, labels) for hidden, labels in rows])
        return self.kernel(hidden_BSH.flatten(0, -2), self.head.weight, self.labels.flatten())


def fuse_loss(model: nn.Module, kernel: LinearCrossEntropy) -> Optional[LossHead]:
    """Make the model return its loss in the place of logits; None where its head is not one plain matrix."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    loss_head = LossHead(head, kernel)
    head.forward = loss_head
    return loss_head


def fuse_layers(model: nn.Module, swiglu: Swiglu) -> None:
    """One matmul for queries, keys and values, and one for gate and up, in every layer that has them plain."""
    for module in model.modules():
        if linears := _plain(module, QUERY_KEY_VALUE):
            _share(linears)
        if (linears := _plain(module, GATED_MLP)) and _is_silu(module):
            _gate(module, linears, swiglu)


def _plain(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The module's own linear layers of these names; none if one is missing, is something else or has a bias."""
    found = [module._modules.get(name) for name in names]
    if any(type(linear) is not nn.Linear or linear.bias is not None for linear in found):
        return []
    return [linear for linear in found if isinstance(linear, nn.Linear)]


def _is_silu(module: nn.Module) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def _share(linears: Sequence[nn.Linear]) -> None:
    """Compute all of them when the first is called; the others, called next, give what is waiting for them."""
    waiting: dict[int, Tensor] = {}
    widths = [layer.out_features for layer in linears]

    def first(x: Tensor) -> Tensor:
        parts = linear(x, torch.cat([layer.weight for layer in linears])).split(widths, -1)
        for index, part in enumerate(parts[1:]):
            waiting[index] = part
        return parts[0]

    def other(index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: waiting.pop(index)

    linears[0].forward = first
    for index, layer in enumerate(linears[1:]):
        layer.forward = other(index)


def _gate(module: nn.Module, linears: Sequence[nn.Linear], swiglu: Swiglu) -> None:
    gate, up, down = linears

    def forward(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return gated_mlp(x, gate.weight, up.weight, down.weight, swiglu)

    module.forward = forward
