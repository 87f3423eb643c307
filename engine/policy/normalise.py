"""How the numbers of states and actions are scaled for a model, and back.

| mode | normalised | source |
|---|---|---|
| quantile | 2 (x - q01) / (q99 - q01) - 1 | openpi's quantile norm; lerobot's QUANTILES |
| mean_std | (x - mean) / std | openpi's z-score; lerobot's MEAN_STD |
| min_max | 2 (x - min) / (max - min) - 1 | GR00T; lerobot's MIN_MAX |
| none | x | |

A dimension that never changes has no scale. The references divide by 1e-8 or 1e-6 there, which turns a rounding error
into a huge number; here it becomes 0 in every mode, and its inverse is the constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import UserError
from engine.policy.statistics import Statistics

MODES = ("quantile", "mean_std", "min_max", "none")
SMALLEST = 1e-8  # a range below this is none


class Normaliser:
    """One feature's transform and its inverse, for tensors [..., D]."""

    def __init__(self, mode: str, statistics: Statistics | None = None, clip: bool = False):
        """`clip` cuts what is normalised to [-1, 1], as GR00T does. UserError for a mode that is none."""
        if mode not in MODES:
            raise UserError(f"normalisation={mode} is none of {', '.join(MODES)}")
        if mode != "none" and statistics is None:
            raise UserError(f"normalisation={mode} needs statistics, and there are none for this feature")
        self.mode, self.clip = mode, clip
        self._centre, self._scale = (None, None) if statistics is None else _centre_and_scale(mode, statistics)

    def __call__(self, values: Tensor) -> Tensor:
        """The numbers as the model takes them, float32."""
        if self.mode == "none":
            return values.float()
        centre, scale = self._on(values)
        flat = scale < SMALLEST
        out = torch.where(flat, 0.0, (values.double() - centre) / torch.where(flat, 1.0, scale)).float()
        return out.clamp(-1, 1) if self.clip else out

    def inverse(self, values: Tensor) -> Tensor:
        """The numbers in the dataset's units again, float32; what was clipped stays so."""
        if self.mode == "none":
            return values.float()
        centre, scale = self._on(values)
        return (values.double() * torch.where(scale < SMALLEST, 0.0, scale) + centre).float()

    def _on(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.shape[-1] != len(self._centre):
            raise UserError(f"{values.shape[-1]} numbers, and the statistics are of {len(self._centre)}")
        return self._centre.to(values.device), self._scale.to(values.device)


def _centre_and_scale(mode: str, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """float64 [D] each: normalised = (x - centre) / scale."""
    if mode == "mean_std":
        return torch.from_numpy(statistics.mean), torch.from_numpy(statistics.std)
    low, high = (statistics.q01, statistics.q99) if mode == "quantile" else (statistics.min, statistics.max)
    return torch.from_numpy((low + high) / 2), torch.from_numpy((high - low) / 2)
