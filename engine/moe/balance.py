"""What keeps experts evenly loaded: the losses on router decisions, as sums that add up over ranks and micro-batches.

T tokens, E experts, G groups of tokens that are balanced each by itself: micro-batches or rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.moe.route import raw_scores
from engine.schema import Run

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Coefficients:
    """How much each loss counts. 0 leaves it out."""

    aux: float = 0.0
    sequence: float = 0.0
    z: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.aux or self.sequence or self.z)


def published_aux_loss(run: Run) -> float:
    """The coefficient of the balancing loss: the run's own, else the published one."""
    own = run.moe.aux_loss
    return run.model.mixture().aux_loss if own is None else own


def step_losses(run: Run) -> Coefficients:
    """What the losses of a training step count."""
    return Coefficients(published_aux_loss(run), run.moe.sequence_aux_loss, run.moe.z_loss)


def scores(logits_TE: Tensor, function: str) -> Tensor:
    """fp32 probabilities of all experts, [T, E]: softmax, or sigmoid divided by its sum (DeepSeek-V3, eq. 20)."""
    values = raw_scores(logits_TE, function)
    return values if function == "softmax" else values / (values.sum(-1, keepdim=True) + 1e-20)


def balancing_sum(scores_TE: Tensor, chosen_TE: Tensor, group_T: Tensor, groups: int, reduce: Reduce) -> Tensor:
    """Sum over groups of (tokens of the group) * E * sum_e f_e P_e, this rank's share of it.

    f_e: assignments to expert e for each token of the group, P_e: the mean score of e (Fedus et al., Switch
    Transformers, arXiv 2101.03961, eq. 4 to 6, with f counted as transformers does: it sums to the number of experts
    of a token). `group_T` gives each token's group, negative for tokens that do not count. `reduce` adds up over the
    ranks that share the tokens of a group; shares add up over them too. The gradient flows through P alone.
    """
    experts = scores_TE.shape[1]
    counted = group_T >= 0
    index = group_T.clamp(min=0)
    weight_T1 = counted.to(scores_TE.dtype).unsqueeze(1)
    zeros = scores_TE.new_zeros(groups, experts)
    mass_GE = zeros.index_add(0, index, scores_TE * weight_T1)
    with torch.no_grad():
        counts_GE = zeros.index_add(0, index, chosen_TE.to(scores_TE.dtype) * weight_T1)
        sizes_G1 = scores_TE.new_zeros(groups, 1).index_add(0, index, weight_T1)
        whole = reduce(torch.cat([counts_GE, sizes_G1], dim=1))
        load_GE = whole[:, :experts] / whole[:, experts:].clamp(min=1)
    return experts * (load_GE * mass_GE).sum()


def z_sum(logits_TE: Tensor, group_T: Tensor) -> Tensor:
    """Sum over tokens of the squared log-sum-exp of their logits (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return (logits_TE.float().logsumexp(-1).square() * (group_T >= 0)).sum()
