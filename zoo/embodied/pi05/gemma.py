"""Gemma's layers as Pi0.5 uses them: a language model that leaves its keys and values, and an expert that reads them.

The published code attends over both sequences at once under a mask. What comes first never sees the actions, so that it
can go first by itself, layer by layer, and the actions after it: the same sums in fewer products.
Sources: openpi `gemma.py`; lerobot 0.6.1 `pi_gemma.py`; Gemma (arXiv 2403.08295).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

EPS = 1e-6
ROPE_THETA = 10000.0

Angles = tuple[Tensor, Tensor]


def angles(positions_BS: Tensor, head_dim: int) -> Angles:
    """Cosines and sines [B, 1, S, head_dim] of rotary positions (arXiv 2104.09864), fp32."""
    places = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BS.device)
    phases = positions_BS[:, None, :, None].float() * (1.0 / ROPE_THETA ** (places / head_dim))
    phases = torch.cat([phases, phases], -1)
    return phases.cos(), phases.sin()


def rotated(x_BHSD: Tensor, turn: Angles) -> Tensor:
    """Channel i of the first half turned with channel i of the second."""
    first, second = x_BHSD.chunk(2, -1)
    cos, sin = (part.to(x_BHSD.dtype) for part in turn)
    return x_BHSD * cos + torch.cat([-second, first], -1) * sin


class RMSNorm(nn.Module):
    """Gemma's: the weight is kept as its difference from 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x_BSW: Tensor) -> Tensor:
        return (normed(x_BSW) * (1 + self.weight.float())).to(x_BSW.dtype)


class AdaptiveRMSNorm(nn.Module):
    """adaRMS: scale, shift and the gate of what follows are linear in a condition (cf. arXiv 2212.09748)."""

    def __init__(self, width: int, cond_dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(cond_dim, 3 * width)

    def forward(self, x_BSW: Tensor, cond_BC: Tensor) -> tuple[Tensor, Tensor]:
        """(normed, gate [B, 1, W])."""
        scale, shift, gate = self.dense(cond_BC).unsqueeze(1).chunk(3, -1)
        return (normed(x_BSW) * (1 + scale.float()) + shift.float()).to(x_BSW.dtype), gate.to(x_BSW.dtype)


def normed(x_BSW: Tensor) -> Tensor:
    """Divided by its root mean square over the last dimension, fp32."""
    x = x_BSW.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


class GemmaMLP(nn.Module):
    def __init__(self, width: int, mlp_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, mlp_dim, bias=False)
        self.up_proj = nn.Linear(width, mlp_dim, bias=False)
        self.down_proj = nn.Linear(mlp_dim, width, bias=False)

    def forward(self, x_BSW: Tensor) -> Tensor:
        return self.down_proj(gelu(self.gate_proj(x_BSW), approximate="tanh") * self.up_proj(x_BSW))


class GemmaAttention(nn.Module):
    """Grouped-query attention, without biases."""

    def __init__(self, width: int, heads: int, groups: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def keys_values(self, x_BSW: Tensor, turn: Angles) -> tuple[Tensor, Tensor]:
        """[B, groups, S, head_dim] each."""
        return rotated(self._heads(self.k_proj(x_BSW)), turn), self._heads(self.v_proj(x_BSW))

    def forward(self, x_BSW: Tensor, turn: Angles, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention of x over keys and values [B, groups, K, head_dim]; mask bool [B, 1, 1, K], False hides a key."""
        q = rotated(self._heads(self.q_proj(x_BSW)), turn)
        out = scaled_dot_product_attention(q, self._spread(k, q), self._spread(v, q), attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x_BSN: Tensor) -> Tensor:
        return x_BSN.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    @staticmethod
    def _spread(x_BGKD: Tensor, q_BHSD: Tensor) -> Tensor:
        """Every group for the heads that share it."""
        shape = (*x_BGKD.shape[:2], q_BHSD.shape[1] // x_BGKD.shape[1], *x_BGKD.shape[2:])
        return x_BGKD.unsqueeze(2).expand(shape).flatten(1, 2)


class GemmaLayer(nn.Module):
    """A layer of the language model."""

    def __init__(self, width: int, mlp_dim: int, heads: int, groups: int, head_dim: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = GemmaAttention(width, heads, groups, head_dim)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = GemmaMLP(width, mlp_dim)

    def forward(self, x_BSW: Tensor, turn: Angles, mask: Tensor, last: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(what the next layer reads, keys, values). Nothing reads what the last layer would put out."""
        h = self.input_layernorm(x_BSW)
        k, v = self.self_attn.keys_values(h, turn)
        if last:
            return x_BSW, k, v
        x_BSW = x_BSW + self.self_attn(h, turn, k, v, mask)
        return x_BSW + self.mlp(self.post_attention_layernorm(x_BSW)), k, v


class ExpertLayer(nn.Module):
    """A layer of the action expert, which reads the keys and values of the language model's layer as well."""

    def __init__(self, width: int, mlp_dim: int, heads: int, groups: int, head_dim: int) -> None:
        super().__init__()
        self.input_layernorm = AdaptiveRMSNorm(width, width)
        self.self_attn = GemmaAttention(width, heads, groups, head_dim)
        self.post_attention_layernorm = AdaptiveRMSNorm(width, width)
        self.mlp = GemmaMLP(width, mlp_dim)

    def forward(
        self, x_BTW: Tensor, cond_BW: Tensor, turn: Angles, k_prefix: Tensor, v_prefix: Tensor, mask: Tensor
    ) -> Tensor:
        """The actions see everything that comes first, and one another."""
        h, gate = self.input_layernorm(x_BTW, cond_BW)
        k, v = self.self_attn.keys_values(h, turn)
        k, v = torch.cat([k_prefix, k], 2), torch.cat([v_prefix, v], 2)
        x_BTW = x_BTW + self.self_attn(h, turn, k, v, mask) * gate
        h, gate = self.post_attention_layernorm(x_BTW, cond_BW)
        return x_BTW + self.mlp(h) * gate
