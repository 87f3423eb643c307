"""Rotary position embeddings for packed rows: angles by token, so that positions can restart anywhere."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from engine import rope_scaling
from engine.errors import UserError


class Rope:
    """Angles of a model's rotary embedding. Called with positions [T], gives fp32 [T, 1, 1, head_dim].

    A `head_dim` below that of the heads is of those first channels that positions rotate.
    """

    def __init__(
        self, head_dim: int, theta: float, scaling: dict[str, Any] | None = None, *, pairs: bool = False
    ) -> None:
        """`scaling` is a published `rope_scaling`; UserError if it asks for what is not supported here.

        `pairs`: neighbouring channels are rotated together (GLM, ERNIE), not those of a head's two halves.
        """
        self.pairs = pairs
        self.kind, self.scaling = scaling_kind(scaling), scaling or {}
        self.inv_freq = inverse_frequencies(head_dim, theta, self.kind, self.scaling)

    def __call__(self, positions_T: Tensor) -> Tensor:
        if self.inv_freq.device != positions_T.device:
            self.inv_freq = self.inv_freq.to(positions_T.device)
        angles = positions_T.float()[:, None] * self.inv_freq[None, :]
        both = angles.repeat_interleave(2, -1) if self.pairs else torch.cat([angles, angles], dim=-1)
        return both[:, None, None, :]

    def configure(self, config: TransformerConfig) -> None:
        """Tell megatron-core's attention what is rotated, and the factor on cosine and sine that YaRN asks for."""
        config.rotary_interleaved = self.pairs
        if self.kind == "yarn":
            config.yarn_rotary_scaling_factor = self.scaling["factor"]
            config.yarn_mscale = self.scaling.get("mscale") or None
            config.yarn_mscale_all_dim = self.scaling.get("mscale_all_dim") or None


class Ropes:
    """Several rotary embeddings, one for each kind of layer: their angles one after another in the last dimension."""

    def __init__(self, *ropes: Rope) -> None:
        self.ropes = ropes
        ends = list(accumulate(2 * rope.inv_freq.numel() for rope in ropes))
        self.shares = tuple(zip([0, *ends[:-1]], ends, strict=True))  # of the angles, from and to

    def __call__(self, positions_T: Tensor) -> Tensor:
        return torch.cat([rope(positions_T) for rope in self.ropes], dim=-1)

    def configure(self, config: TransformerConfig) -> None:
        """The kinds may differ in base and width alone: everything else would have to be told to each layer."""


def magnitude(kind: str, scaling: dict[str, Any]) -> float:
    """YaRN's factor on cosine and sine (arXiv 2309.00071, section 3.4), as `mscale` and `mscale_all_dim` change it."""
    if kind != "yarn" or scaling["factor"] <= 1:
        return 1.0

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    mscale, every = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(mscale) / grown(every) if mscale and every else grown(1.0)


def scaling_kind(scaling: dict[str, Any] | None) -> str:
    """The checked `rope_type` of a published `rope_scaling`."""
    if problem := next(rope_scaling.problems(scaling, "megatron"), None):
        raise UserError(f"model.rope_scaling: {problem}")
    return rope_scaling.kind_of(scaling)


def inverse_frequencies(head_dim: int, theta: float, kind: str, scaling: dict[str, Any]) -> Tensor:
    """Angle per position of each pair of channels, fp32 [head_dim / 2] (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "llama3":
        return _llama3(inv_freq, scaling)
    if kind == "yarn":
        return _yarn(inv_freq, head_dim, theta, scaling)
    return inv_freq


def _blend(inv_freq: Tensor, factor: float, keep: Tensor) -> Tensor:
    """Between positions squeezed by `factor` (keep 0) and as trained (keep 1)."""
    return inv_freq / factor * (1 - keep) + inv_freq * keep


def _llama3(inv_freq: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long waves squeezed, short ones kept, a linear blend between (Llama 3.1's published `rope_type: llama3`)."""
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    return _blend(inv_freq, scaling["factor"], ((turns - low) / (high - low)).clamp(0, 1))


def _yarn(inv_freq: Tensor, head_dim: int, theta: float, scaling: dict[str, Any]) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a linear blend over the channels between two numbers of rotations."""

    def channel(rotations: float) -> float:
        wavelengths = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A blend of no width would divide by zero; the published implementations widen it by this much.
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    return _blend(inv_freq, scaling["factor"], 1 - ramp)
