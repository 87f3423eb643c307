"""The correction bias of routers: a number for each expert that moves the choice of experts and not their weights.

Balancing without a loss (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2): after each step
the bias of an expert that had more than the mean load falls by a fixed amount, and that of one with less rises by it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


@torch.no_grad()
def update(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Move the fp32 `bias_E` (of any shape with E elements) by `rate`, in place.

    `counts_E` are the assignments to each expert over the whole global batch. They are whole numbers, compared as such,
    so that every layout moves every bias the same way; an expert with exactly the mean load keeps its bias.
    """
    counts_E = counts_E.double()
    direction = torch.sign(counts_E.sum() - counts_E * counts_E.numel())
    bias_E.add_((direction.float() * rate).view_as(bias_E).to(bias_E.device))


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong to a model's state, by name; those that follow from its config do not."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def is_trained(model: nn.Module, buffer: str) -> bool:
    """Whether a buffer moves with its surroundings: the parameters of the nearest module around it that has some."""
    module = buffer
    while module:
        module = module.rpartition(".")[0]
        if parameters := list(model.get_submodule(module).parameters()):
            return all(parameter.requires_grad for parameter in parameters)
    return True
