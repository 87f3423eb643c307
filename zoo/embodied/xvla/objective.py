"""Denoising as X-VLA is trained: how far the clean actions that the head gives are off, for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from engine.backends.native.objective import Keep, Module
from engine.data.policy_batch import PolicyBatch
from engine.schema import Run
from zoo.xvla.model import XvlaPolicy


class Denoising:
    """See `engine.backends.native.objective.Objective`. Batches are those of `zoo.xvla.processor`."""

    unit = "samples"

    def meta_model(self, run: Run, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return XvlaPolicy(run.model).to(dtype)

    def loss_sum(self, module: Module, batch: PolicyBatch, keep: Optional[Keep] = None) -> Tensor:
        return self._rows(module, batch, keep).sum()

    def row_losses(self, module: Module, batch: PolicyBatch) -> Tensor:
        return self._rows(module, batch, None)

    @staticmethod
    def _rows(module: Module, batch: PolicyBatch, keep: Optional[Keep]) -> Tensor:
        """[B]: the mean over the steps within a sample's episode, in fp32."""
        given, errors_BT = module(batch)
        if keep is not None:
            keep(given.detach())
        kept_BT = ~batch.action_pad
        rows = (errors_BT * kept_BT).sum(1) / kept_BT.sum(1).clamp(min=1)
        return rows * batch.counted().to(rows.device)

    def count(self, batch: PolicyBatch) -> int:
        return batch.num_items

    def row_counts(self, batch: PolicyBatch) -> Tensor:
        return batch.counted()

    def empty(self, like: Sequence[PolicyBatch]) -> PolicyBatch:
        """One of this rank's samples, not to be counted. Every rank has some: data and jobs deal them out evenly."""
        return like[0].uncounted()

    def outputs(self, module: Module, batch: PolicyBatch) -> dict[str, Tensor]:
        """`actions`, sampled from `batch.noise`; `prediction` where there are actions and times to noise them to."""
        found: dict[str, Tensor] = {"actions": module(batch, sample=True)}
        if batch.time is not None:
            found["prediction"], _ = module(batch)
        return found


OBJECTIVE: Any = Denoising()
