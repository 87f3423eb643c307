"""The last matrix and the loss together: the interface, and the reference that holds all logits.

T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn.functional import cross_entropy, linear

IGNORE = -100


class LinearCrossEntropy(Protocol):
    def __call__(self, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
        """Cross-entropy in nats, in fp32, summed over the labels that are not -100: a scalar; 0 if there is none."""


def linear_cross_entropy(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """See `LinearCrossEntropy`."""
    logits = linear(hidden_TH, weight_VH).float()
    return cross_entropy(logits, labels_T, ignore_index=IGNORE, reduction="sum")
