"""Runs in which full experts turn assignments away: what they turn away, told by another run if need be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class Decision:
    """Which assignments of a micro-batch the experts of a layer take: [T, E] each, its tokens in order."""

    probs: Tensor  # how likely each is; a full expert takes the likeliest
    chosen: Tensor
    kept: Tensor

    def like(self, probs: Tensor) -> float:
        """How far other likelihoods of the same size are."""
        return (self.probs - probs).abs().max().item() if self.probs.shape == probs.shape else float("inf")


def run(config: str, given: list[Decision] | None = None) -> tuple[int, list[Decision]]:
    """The worker's job on this rank: its exit status, and what its experts decided.

    All ranks that share a micro-batch decide alike. With `given` the decision of the micro-batch and layer that is most
    like the one at hand takes the place of the own one, which is still told.
    """
    from engine.backends.megatron import router
    from engine.worker import run_job

    decisions: list[Decision] = []
    own: Any = router.keep

    def keep(probs: Tensor, chosen: Tensor, limit: int, policy: str) -> Tensor:
        decisions.append(Decision(probs.clone(), chosen.clone(), own(probs, chosen, limit, policy)))
        if given is None:
            return decisions[-1].kept
        same = min(given, key=lambda decision: decision.like(probs))
        assert torch.equal(same.chosen, chosen), "the routers themselves decided otherwise"
        return same.kept

    router.keep = keep
    try:
        code = run_job(Path(config))
    finally:
        router.keep = own
    return code, decisions


def margin(mine: Decision, theirs: Decision) -> float:
    """How far apart, relative, the likelihoods are of the assignments on which two decisions differ. 0: none differ."""
    farthest = 0.0
    for expert in (mine.kept != theirs.kept).any(0).nonzero().flatten().tolist():
        values = mine.probs[:, expert][mine.kept[:, expert] != theirs.kept[:, expert]]
        farthest = max(farthest, ((values.max() - values.min()) / values.max()).item())
    return farthest
