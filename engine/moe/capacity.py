"""Experts with a capacity: what a full one turns away."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def capacity(tokens: int, topk: int, experts: int, factor: float) -> int:
    """Assignments an expert takes of `tokens` tokens: `factor` times an even share, rounded up (GShard, 2006.16668)."""
    return math.ceil(tokens * topk / experts * factor)


def keep(probs_TE: Tensor, chosen_TE: Tensor, limit: int, policy: str) -> Tensor:
    """bool [T, E]: of the chosen assignments, at most `limit` for each expert.

    `policy` "probs" keeps the likeliest, "position" the first. Equal ones are kept in order of their position.
    """
    if limit >= chosen_TE.shape[0]:
        return chosen_TE
    if policy == "position":
        return chosen_TE & (chosen_TE.cumsum(0) <= limit)
    ranked = probs_TE.masked_fill(~chosen_TE, -1.0).sort(dim=0, descending=True, stable=True).indices
    first = torch.zeros_like(chosen_TE).scatter_(0, ranked[:limit], True)
    return chosen_TE & first
