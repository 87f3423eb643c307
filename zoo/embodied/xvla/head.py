"""X-VLA's head (arXiv 2510.10274): plain transformer blocks over actions, features and soft prompts, no mask.

Names are the published ones. What depends on the robot lies in tables with a row for each domain.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention

from zoo.xvla.config import XvlaConfig

MAX_PERIOD = 100


class DomainAwareLinear(nn.Module):
    """A linear layer whose weights [in, out] and bias are rows of tables."""

    def __init__(self, inner: int, outer: int, domains: int) -> None:
        super().__init__()
        self.inner = inner
        self.fc = nn.Embedding(domains, outer * inner)
        self.bias = nn.Embedding(domains, outer)

    def forward(self, x_BSI: Tensor, domain_B: Tensor) -> Tensor:
        weight = self.fc(domain_B).unflatten(1, (self.inner, -1))
        return torch.matmul(x_BSI, weight) + self.bias(domain_B)[:, None]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, drop
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BSW: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BSW).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = scaled_dot_product_attention(q, k, v, dropout_p=self.drop if self.training else 0.0)
        return self.proj(x.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x_BSW: Tensor) -> Tensor:
        x = dropout(gelu(self.fc1(x_BSW), approximate="tanh"), self.drop, self.training)
        return dropout(self.fc2(x), self.drop, self.training)


class HeadBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, drop: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, drop)
        self.mlp = MLP(width, inner, drop)

    def forward(self, x_BSW: Tensor) -> Tensor:
        x_BSW = x_BSW + self.attn(self.norm1(x_BSW))
        return x_BSW + self.mlp(self.norm2(x_BSW))


class SoftPromptedTransformer(nn.Module):
    """Partly noised actions to clean ones, given what was seen and said."""

    def __init__(self, config: XvlaConfig) -> None:
        super().__init__()
        self.config = c = config
        self.blocks = nn.ModuleList(
            HeadBlock(c.hidden_size, c.num_heads, int(c.hidden_size * c.mlp_ratio), c.head_dropout)
            for _ in range(c.depth)
        )
        self.vlm_proj = self._projection()
        self.aux_visual_proj = self._projection()
        self.pos_emb = nn.Parameter(torch.zeros(1, c.max_len_seq, c.hidden_size))
        self.norm = nn.LayerNorm(c.hidden_size)
        inner = c.action_dim + c.dim_time + c.state_dim
        self.action_encoder = DomainAwareLinear(inner, c.hidden_size, c.num_domains)
        self.action_decoder = DomainAwareLinear(c.hidden_size, c.action_dim, c.num_domains)
        if c.len_soft_prompts > 0:
            self.soft_prompt_hub = nn.Embedding(c.num_domains, c.len_soft_prompts * c.hidden_size)

    def _projection(self) -> nn.Module:
        c = self.config
        if c.use_hetero_proj:
            return DomainAwareLinear(c.d_model, c.hidden_size, c.num_domains)
        return nn.Linear(c.d_model, c.hidden_size)

    def context(self, features_BFD: Tensor, other_BGD: Tensor, domain_B: Tensor, steps: int) -> Tensor:
        """What follows the `steps` actions, [B, F + G + P, hidden]: the same at every step of the sampler."""
        given = (domain_B,) if self.config.use_hetero_proj else ()
        x = torch.cat([self.vlm_proj(features_BFD, *given), self.aux_visual_proj(other_BGD, *given)], 1)
        if steps + x.shape[1] > self.config.max_len_seq:
            raise ValueError(f"{steps} actions and {x.shape[1]} features: more than {self.config.max_len_seq} tokens")
        x = x + self.pos_emb[:, steps : steps + x.shape[1]]
        if self.config.len_soft_prompts > 0:
            prompts = self.soft_prompt_hub(domain_B).unflatten(1, (self.config.len_soft_prompts, -1))
            x = torch.cat([x, prompts.to(x.dtype)], 1)
        return x

    def forward(
        self, noised_BTA: Tensor, state_BD: Tensor, time_B: Tensor, domain_B: Tensor, context: Tensor
    ) -> Tensor:
        """The clean actions, [B, T, A] in the weights' dtype."""
        steps = noised_BTA.shape[1]
        told = torch.cat([state_BD, time_embedding(time_B, self.config.dim_time)], 1)[:, None].expand(-1, steps, -1)
        inputs = torch.cat([noised_BTA, told], 2).to(self.pos_emb.dtype)
        x = self.action_encoder(inputs, domain_B) + self.pos_emb[:, :steps]
        x = torch.cat([x, context.to(x.dtype)], 1)
        for block in self.blocks:
            x = block(x)
        return self.action_decoder(self.norm(x[:, :steps]), domain_B)


def time_embedding(time_B: Tensor, width: int) -> Tensor:
    """Cosines, then sines, of a time at angular rates from 1 to 1 / 100, [B, width]; an odd width ends with a 0."""
    half = width // 2
    rates = torch.exp(-math.log(MAX_PERIOD) * torch.arange(half, device=time_B.device, dtype=time_B.dtype) / half)
    angles = time_B[:, None] * rates
    return torch.cat([angles.cos(), angles.sin(), angles.new_zeros(len(time_B), width % 2)], 1)
