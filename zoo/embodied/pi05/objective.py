"""Flow matching (arXiv 2210.02747) as Pi0.5 is trained: the mean squared error of a velocity, for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from engine.backends.native.objective import Keep, Module
from engine.data.policy_batch import PolicyBatch
from engine.schema import Run
from zoo.pi05.model import Pi05Policy


class FlowMatching:
    """See `engine.backends.native.objective.Objective`. Batches are those of `zoo.pi05.processor`."""

    unit = "samples"

    def meta_model(self, run: Run, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return Pi05Policy(run.model).to(dtype)

    def loss_sum(self, module: Module, batch: PolicyBatch, keep: Optional[Keep] = None) -> Tensor:
        return self._rows(module, batch, keep).sum()

    def row_losses(self, module: Module, batch: PolicyBatch) -> Tensor:
        return self._rows(module, batch, None)

    @staticmethod
    def _rows(module: Module, batch: PolicyBatch, keep: Optional[Keep]) -> Tensor:
        """[B]: the mean over a sample's own action numbers and the steps within its episode, in fp32."""
        velocity = module(batch)
        if keep is not None:
            keep(velocity.detach())
        numbers = batch.actions.shape[-1]  # without the zeros that fill them up
        wanted = batch.noise[..., :numbers] - batch.actions
        errors_BT = (velocity[..., :numbers].float() - wanted).square().mean(-1)
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
        """`actions`, sampled from `batch.noise`; `velocity` where there are actions and times to noise them to."""
        found: dict[str, Tensor] = {"actions": module(batch, sample=True)}
        if batch.time is not None:
            found["velocity"] = module(batch)
        return found


OBJECTIVE: Any = FlowMatching()
