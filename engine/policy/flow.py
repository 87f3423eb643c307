"""Flow matching (arXiv 2210.02747): the mean squared error of a velocity, for each sample.

A family says which model, and which velocity it is that the model gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from engine.backends.native.objective import Keep, Module
from engine.data.policy_batch import PolicyBatch
from engine.schema import Run


def towards_noise(actions_BTA: Tensor, noise_BTA: Tensor) -> Tensor:
    """d/dt of t noise + (1 - t) actions: Pi0's."""
    return noise_BTA - actions_BTA


def towards_actions(actions_BTA: Tensor, noise_BTA: Tensor) -> Tensor:
    """d/dt of (1 - t) noise + t actions: GR00T's."""
    return actions_BTA - noise_BTA


class FlowMatching:
    """See `engine.backends.native.objective.Objective`. Batches are those of a family's processor."""

    unit = "samples"

    def __init__(self, model: Callable[[Any], nn.Module], wanted: Callable[[Tensor, Tensor], Tensor]) -> None:
        """`model(config)` builds the module; it is called with a batch and, for actions, `sample=True`."""
        self._model, self._wanted = model, wanted

    def meta_model(self, run: Run, dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            module = self._model(run.model)
        for parameter in module.parameters():  # buffers keep theirs: rotary frequencies would lose places
            parameter.data = parameter.data.to(dtype)
        return module

    def loss_sum(self, module: Module, batch: PolicyBatch, keep: Optional[Keep] = None) -> Tensor:
        return self._rows(module, batch, keep).sum()

    def row_losses(self, module: Module, batch: PolicyBatch) -> Tensor:
        return self._rows(module, batch, None)

    def _rows(self, module: Module, batch: PolicyBatch, keep: Optional[Keep]) -> Tensor:
        """[B]: the mean over a sample's own action numbers and the steps within its episode, in fp32."""
        velocity = module(batch)
        if keep is not None:
            keep(velocity.detach())
        numbers = batch.actions.shape[-1]  # without the zeros that fill them up
        wanted = self._wanted(batch.actions, batch.noise[..., :numbers])
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
