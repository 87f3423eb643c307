"""What a model is trained for: the part of the native backend that a family may replace.

The default is a language model: tokens in, logits out, cross-entropy over supervised tokens. A family whose models are
no token decoders names an object of its own (`Family.native`); the backend's strategies, optimizer, accumulation,
checkpoints and evaluation are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Protocol

import torch
from torch import Tensor, nn

from engine.backends.native.attention import inputs
from engine.backends.native.fuse import LossHead
from engine.backends.native.loss import loss_sum, row_losses
from engine.backends.sources import row_tokens
from engine.data.batch import IGNORE, Batch
from engine.schema import Run

Keep = Callable[[Tensor], None]
Module = Callable[..., Any]  # the wrapped model, in the run's precision


class Objective(Protocol):
    """A family's models and their loss. Batches are whatever the family's data are made of."""

    unit: str  # what a batch's items are called: tokens | samples

    def meta_model(self, run: Run, dtype: torch.dtype) -> nn.Module:
        """The model of `run.model`, its tensors without memory; the layers' classes are its `_no_split_modules`."""

    def loss_sum(self, module: Module, batch: Any, keep: Optional[Keep] = None) -> Tensor:
        """The sum of the items' losses, fp32; items that only fill a batch up give 0.

        `module` is to be called once. `keep` is given what the loss is made of, where it is asked for.
        """

    def row_losses(self, module: Module, batch: Any) -> Tensor:
        """The same for each row of the batch, [B]: mixtures report their sources apart."""

    def count(self, batch: Any) -> int:
        """Items that the loss is a sum over."""

    def row_counts(self, batch: Any) -> Tensor:
        """The same for each row, [B]."""

    def empty(self, like: Sequence[Any]) -> Any:
        """A batch without an item: a sharded model's ranks compute together. `like` are this rank's own, maybe none."""

    def outputs(self, module: Module, batch: Any) -> dict[str, Tensor]:
        """What `job=forward` gives besides the loss, [B, ...] each."""


class LanguageModel:
    """Next tokens: what transformers' causal language models are trained for."""

    unit = "tokens"

    def __init__(self, compiled: bool = False, loss_head: Optional[LossHead] = None) -> None:
        """With a `loss_head` the module's "logits" are the loss."""
        self._loss_sum = torch.compile(loss_sum) if compiled else loss_sum
        self._head = loss_head

    def loss_sum(self, module: Module, batch: Batch, keep: Optional[Keep] = None) -> Tensor:
        """Cross-entropy in nats over the supervised tokens; `keep` is given the logits [B, S, V]."""
        if self._head is not None:
            assert keep is None, "logits are not kept where the loss is fused with the last matrix"
            return self._fused(module, batch, by_row=False)
        logits = self._logits(module, batch, keep)
        return self._loss_sum(logits, batch.labels_BS)

    def row_losses(self, module: Module, batch: Batch) -> Tensor:
        if self._head is not None:
            return self._fused(module, batch, by_row=True)
        return row_losses(self._logits(module, batch, None), batch.labels_BS)

    def count(self, batch: Batch) -> int:
        return batch.num_tokens

    def row_counts(self, batch: Batch) -> Tensor:
        return row_tokens(batch.labels_BS)

    def empty(self, like: Sequence[Batch]) -> Batch:
        """One token without a label."""
        zero = torch.zeros(1, 1, dtype=torch.int64)
        return Batch(zero, torch.full_like(zero, IGNORE), zero, torch.tensor([0, 1], dtype=torch.int32), 1)

    def _fused(self, module: Module, batch: Batch, by_row: bool) -> Tensor:
        self._head.labels, self._head.by_row = batch.labels_BS, by_row
        return module(**inputs(batch)).logits

    @staticmethod
    def _logits(module: Module, batch: Batch, keep: Optional[Keep]) -> Tensor:
        logits = module(**inputs(batch)).logits
        if keep is not None:
            keep(logits.detach())
        return logits
