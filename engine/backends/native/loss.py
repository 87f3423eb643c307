"""The loss of a micro-batch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from engine.data.batch import IGNORE


def loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Cross-entropy in nats, in fp32, summed over the supervised tokens; labels are shifted already. 0 for no token."""
    return cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten(), ignore_index=IGNORE, reduction="sum")


def row_losses(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """The same for each row, [B]."""
    logits, labels = logits_BSV.flatten(0, 1).float(), labels_BS.flatten()
    return cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none").view_as(labels_BS).sum(1)
