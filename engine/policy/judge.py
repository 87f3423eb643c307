"""Judging a policy by held-out episodes: its loss at fixed noise and times, and how far its actions are off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from engine.backends.base import Backend
from engine.comm import Comm
from engine.data.lerobot.loader import PolicyHeldOut
from engine.data.policy_batch import PolicyBatch


class Judged:
    """Held-out samples as the model reads them. The same samples, noise and times at every evaluation."""

    def __init__(self, held_out: PolicyHeldOut, processor: Any, names: Sequence[str]) -> None:
        """`names` of the action's numbers, in the dataset's order."""
        self._held_out, self._processor, self._names = held_out, processor, tuple(names)
        self._seen: Optional[tuple[int, list[PolicyBatch]]] = None  # kept between the two halves of an evaluation

    def batches(self, rows: int) -> list[PolicyBatch]:
        """This rank's micro-batches."""
        self._seen = rows, self._held_out.batches(rows)
        return [self._processor(batch) for batch in self._seen[1]]

    def coverage(self, rows: int) -> tuple[int, int, bool]:
        """See `PolicyHeldOut.coverage`."""
        return self._held_out.coverage(rows)

    def label_bytes(self, rows: int) -> Optional[int]:
        """Actions are no text."""
        return None

    def measures(self, backend: Backend, rows: int, comm: Comm) -> dict[str, float]:
        """Mean absolute error of sampled actions, in the dataset's own units: `action_error.<name>` and their mean.

        The full sampler runs from each sample's own noise. Steps beyond an episode's end do not count. Collective.
        """
        seen, self._seen = self._seen, None
        raw = seen[1] if seen is not None and seen[0] == rows else self._held_out.batches(rows)
        sampled = backend.outputs([self._processor(batch) for batch in raw])
        errors = action_errors(raw, [self._processor.actions(out["actions"]) for out in sampled])
        totals = torch.tensor(comm.all_gather(errors.tolist()), dtype=torch.float64).sum(0)
        means = (totals[:-1] / totals[-1].clamp(min=1)).tolist()
        named = {f"action_error.{name}": error for name, error in zip(self._names, means, strict=True)}
        return {"action_error": sum(means) / len(means)} | named


def action_errors(raw: Sequence[PolicyBatch], given: Sequence[Tensor]) -> Tensor:
    """float64 [A + 1]: absolute errors summed over samples and steps that count, and how many those were."""
    total: Tensor | float = 0.0
    for batch, actions in zip(raw, given, strict=True):
        counted_BT = batch.counted()[:, None] & ~batch.action_pad
        off = (actions.double() - batch.actions.double()).abs() * counted_BT[..., None]
        total = total + torch.cat([off.sum((0, 1)), counted_BT.sum()[None].double()])
    assert isinstance(total, Tensor), "every rank has samples, if only to fill up"
    return total
