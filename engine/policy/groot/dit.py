"""GR00T's diffusion transformer, whose blocks turn to text, to images and to themselves; names are the published ones.

Source: NVIDIA's GR00T N1.5 to N1.7 as lerobot 0.6.1 has them (`cross_attention_dit.py`), made of diffusers' parts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention, silu

EPS = 1e-5
EPS_OUT = 1e-6
TIME_WIDTH = 256  # sines and cosines that a time is told with


class Attention(nn.Module):
    """Attention with biases; keys and values of another sequence where there is one."""

    def __init__(self, width: int, heads: int, dropout: float, seen: int | None = None) -> None:
        """`seen`: the width of what is attended to, if it is not the sequence itself."""
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(seen or width, width)
        self.to_v = nn.Linear(seen or width, width)
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))

    def forward(self, x_BTW: Tensor, seen_BSV: Tensor, mask: Tensor | None) -> Tensor:
        """`mask`: bool [B, 1, 1, S], what may be attended to."""
        layers = ((self.to_q, x_BTW), (self.to_k, seen_BSV), (self.to_v, seen_BSV))
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer, x in layers)
        return self.to_out(scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Gelu(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        gelu, out = Gelu(width, 4 * width), nn.Linear(4 * width, width)
        self.net = nn.Sequential(gelu, nn.Dropout(dropout), out, nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class AdaLayerNorm(nn.Module):
    """A norm without weights of its own, scaled and shifted by what a time says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x_BTW: Tensor, time_BW: Tensor) -> Tensor:
        scale, shift = self.linear(silu(time_BW))[:, None].chunk(2, -1)
        return layer_norm(x_BTW, x_BTW.shape[-1:], eps=EPS) * (1 + scale) + shift


class DiTBlock(nn.Module):
    """Attention to itself or to what was seen, then a feed-forward layer."""

    def __init__(self, width: int, heads: int, dropout: float, seen: int | None) -> None:
        super().__init__()
        self.norm1 = AdaLayerNorm(width)
        self.attn1 = Attention(width, heads, dropout, seen)
        self.drop = nn.Dropout(dropout)
        self.ff = FeedForward(width, dropout)

    def forward(self, x_BTW: Tensor, time_BW: Tensor, seen_BSV: Tensor | None, mask: Tensor | None) -> Tensor:
        normed = self.norm1(x_BTW, time_BW)
        x_BTW = x_BTW + self.drop(self.attn1(normed, normed if seen_BSV is None else seen_BSV, mask))
        return x_BTW + self.ff(layer_norm(x_BTW, x_BTW.shape[-1:], eps=EPS))


class VLBlock(nn.Module):
    """Self-attention over what was seen and said."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPS)
        self.attn1 = Attention(width, heads, dropout)
        self.drop = nn.Dropout(dropout)
        self.norm3 = nn.LayerNorm(width, EPS)
        self.ff = FeedForward(width, dropout)

    def forward(self, x_BSV: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm1(x_BSV)
        x_BSV = x_BSV + self.drop(self.attn1(normed, normed, mask))
        return x_BSV + self.ff(self.norm3(x_BSV))


class VLSelfAttention(nn.Module):
    """Blocks over the backbone's tokens [B, S, V]. Those that only fill up are not attended to."""

    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(VLBlock(width, heads, dropout) for _ in range(layers))

    def forward(self, x_BSV: Tensor, mask_BS: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x_BSV = block(x_BSV, mask_BS[:, None, None])
        return x_BSV


class TimestepEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIME_WIDTH, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(silu(self.linear_1(x)))


class TimestepEncoder(nn.Module):
    """A bucket of time, int [B], to [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedding(width)

    def forward(self, bucket_B: Tensor) -> Tensor:
        half = TIME_WIDTH // 2
        steps = torch.arange(half, dtype=torch.float32, device=bucket_B.device)
        phases = bucket_B.float()[:, None] * torch.exp(-math.log(10000) * steps / (half - 1))
        told = torch.cat([phases.cos(), phases.sin()], 1)
        return self.timestep_embedder(told.to(self.timestep_embedder.linear_1.weight.dtype))


class AlternateVLDiT(nn.Module):
    """[state, actions] [B, T, W] to [B, T, outer]: blocks 0, 2, 4, ... attend to text or images, the others to T.

    Of the former, every n-th looks at the text and the others at the images, where n is `every`.
    """

    def __init__(self, heads: int, head_dim: int, layers: int, dropout: float, seen: int, outer: int, every: int):
        super().__init__()
        width = heads * head_dim
        self.every = every
        self.timestep_encoder = TimestepEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(width, heads, dropout, None if number % 2 else seen) for number in range(layers)
        )
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, outer)

    def forward(self, x_BTW: Tensor, bucket_B: Tensor, seen_BSV: Tensor, text_BS: Tensor, image_BS: Tensor) -> Tensor:
        """`text_BS` and `image_BS`: bool, which of what was seen and said is which; neither where it only fills up."""
        time = self.timestep_encoder(bucket_B)
        text, image = _attended(text_BS), _attended(image_BS)
        for number, block in enumerate(self.transformer_blocks):
            if number % 2:
                x_BTW = block(x_BTW, time, None, None)
            else:
                x_BTW = block(x_BTW, time, seen_BSV, image if number % (2 * self.every) else text)
        shift, scale = self.proj_out_1(silu(time))[:, None].chunk(2, -1)
        x_BTW = layer_norm(x_BTW, x_BTW.shape[-1:], eps=EPS_OUT) * (1 + scale) + shift
        return self.proj_out_2(x_BTW)


def _attended(mask_BS: Tensor) -> Tensor:
    """[B, 1, 1, S]. Where there is nothing (no image), everything: a row that reads nothing has no softmax."""
    return (mask_BS | ~mask_BS.any(1, keepdim=True))[:, None, None]
