"""An exponential moving average of weights: what a policy is evaluated and published with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Average:
    """ema = decay * ema + (1 - decay) * weight after every update, in fp32, of the tensors that a rank updates.

    Source: openpi's training state; Polyak and Juditsky 1992 for the idea. There is no correction at the beginning: the
    average starts at the weights that training starts from.
    """

    def __init__(self, tensors: Sequence[Tensor], decay: float) -> None:
        self._tensors, self._decay = list(tensors), decay
        self._averages = {tensor: tensor.detach().float().clone() for tensor in tensors}

    def of(self, tensor: Tensor) -> Tensor:
        """The average of one of the tensors, in its shape."""
        return self._averages[tensor]

    @torch.no_grad()
    def update(self, weights: Callable[[Tensor], Tensor]) -> None:
        """Take in the tensors' values, as `weights` gives them in fp32; one at a time, as that may be a copy."""
        for tensor in self._tensors:
            self._averages[tensor].lerp_(weights(tensor), 1 - self._decay)
