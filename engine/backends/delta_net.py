"""The mathematics of a gated DeltaNet layer between its projections, the same on both backends.

T tokens, K key heads of width D; each has r value heads of width E, H = K r in all. A key head's channels lie together,
as Qwen3-Next publishes them: q, k [D], v, z [r E] of `in_proj_qkvz`, b, a [r] of `in_proj_ba`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from hardware.kernels.delta_rule import DeltaRule, exact


@dataclass(frozen=True)
class Heads:
    """The widths of a layer's heads."""

    key: int  # D
    value: int  # E
    values: int  # r

    @property
    def mixed(self) -> int:
        """Channels of a key head that pass through the convolution: q, k and v."""
        return 2 * self.key + self.values * self.value

    @property
    def all(self) -> int:
        """Those and z."""
        return self.mixed + self.values * self.value


def by_head(conv_C1W: Tensor, heads: Heads) -> Tensor:
    """The published convolution (all heads' q, then k, then v) as [K, mixed channels, W]."""
    weight_CW = conv_C1W.squeeze(1)
    count = weight_CW.shape[0] // heads.mixed
    widths = (heads.key, heads.key, heads.values * heads.value)
    parts = weight_CW.split([count * width for width in widths])
    return torch.cat([part.unflatten(0, (count, width)) for part, width in zip(parts, widths, strict=True)], 1)


def mix(
    qkv_TKC: Tensor,
    ba_TKB: Tensor,
    conv_KCW: Tensor,
    decay_H: Tensor,
    step_H: Tensor,
    heads: Heads,
    cu_seqlens: Tensor,
    kernels: DeltaRule,
) -> Tensor:
    """[T, H, E]. `decay_H` is the published A_log, `step_H` dt_bias; of any K of the layer's key heads."""
    count, width = qkv_TKC.shape[1:]
    mixed = kernels.convolve(qkv_TKC.flatten(1), conv_KCW.flatten(0, 1), cu_seqlens).unflatten(1, (count, width))
    q, k, v = mixed.split([heads.key, heads.key, heads.values * heads.value], -1)
    b, a = (x.flatten(1) for x in ba_TKB.chunk(2, -1))
    g_TH = -exact(decay_H).exp() * softplus(exact(a) + exact(step_H))
    v_THE = v.unflatten(-1, (heads.values, heads.value)).flatten(1, 2)
    return kernels.attend(q, k, v_THE, g_TH, b.sigmoid(), cu_seqlens)


def gated_norm(x_THE: Tensor, z_THE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """A norm of each head, then silu(z) times it; norm and gate in at least fp32."""
    normed = weight_E * rms_norm(exact(x_THE), weight_E.shape, eps=eps).to(x_THE.dtype)
    return (normed * silu(exact(z_THE))).to(x_THE.dtype)
