"""What a model's mixture of experts is, as its family says it. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """A family's experts."""

    experts: int
    topk: int  # experts of each token
    ffn_hidden_size: int  # of one expert
    layers: tuple[bool, ...]  # which layers of the model have experts
    score_function: str = "softmax"  # softmax | sigmoid
    normalised: bool = True  # the weights of a token's experts sum to 1 ...
    least_sum: float | None = None  # ... divided by no less than this
    scaling_factor: float | None = None  # on the weights
    groups: int | None = None  # experts are chosen from the best groups only ...
    group_topk: int | None = None  # ... of which there are so many
    group_best: int = 2  # a group counts as much as its so many best experts
    bias: bool = False  # a correction bias on the choice, not on the weights
    shared_ffn_hidden_size: int | None = None  # of the expert that all tokens go through
    shared_gate: bool = False  # which is weighed, for each token, by a sigmoid
    aux_loss: float = 0.0  # the published coefficient of the balancing loss
