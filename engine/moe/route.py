"""How a router chooses: the experts of each token and their weights, the same on both backends.

T tokens, E experts, k experts of a token, G groups of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.moe.mixture import Mixture


def choose(logits_TE: Tensor, bias_E: Tensor | None, mixture: Mixture) -> Tensor:
    """int64 [T, k]: the experts with the best scores, the correction bias added if there is one.

    With groups, only experts of the `group_topk` best ones: a group is as good as its `group_best` best experts
    together (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; DeepSeek-V2 counts one).
    """
    with torch.no_grad():
        values_TE = raw_scores(logits_TE, mixture.score_function)
        if bias_E is not None:
            values_TE = values_TE + bias_E.float()
        if mixture.groups and mixture.group_topk:
            values_TE = values_TE.masked_fill(~_best_groups(values_TE, mixture), float("-inf"))
        return values_TE.topk(mixture.topk, dim=1).indices


def _best_groups(values_TE: Tensor, mixture: Mixture) -> Tensor:
    values_TGM = values_TE.unflatten(1, (mixture.groups, -1))
    best_TG = values_TGM.topk(min(mixture.group_best, values_TGM.shape[2]), dim=2).values.sum(2)
    chosen_TG = torch.zeros_like(best_TG, dtype=torch.bool)
    chosen_TG.scatter_(1, best_TG.topk(mixture.group_topk, dim=1).indices, True)
    return chosen_TG.unsqueeze(2).expand_as(values_TGM).flatten(1)


def weigh(logits_TE: Tensor, chosen_Tk: Tensor, mixture: Mixture) -> Tensor:
    """fp32 [T, k]: the weights of the chosen experts: their scores, without the bias."""
    values_Tk = raw_scores(logits_TE, mixture.score_function).gather(1, chosen_Tk)
    if mixture.normalised:
        total_T1 = values_Tk.sum(-1, keepdim=True)
        values_Tk = values_Tk / (total_T1.clamp(min=mixture.least_sum) if mixture.least_sum else total_T1 + 1e-20)
    return values_Tk * mixture.scaling_factor if mixture.scaling_factor else values_Tk


def raw_scores(logits_TE: Tensor, function: str) -> Tensor:
    """fp32 scores of all experts: softmax, or the sigmoid of each by itself."""
    return logits_TE.softmax(-1, dtype=torch.float32) if function == "softmax" else logits_TE.float().sigmoid()
