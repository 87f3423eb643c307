"""Attention with grouped queries whose layers differ from one another, or whose norms go over all heads."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn


@dataclass(frozen=True)
class Heads:
    """The heads of one layer, where they are not what the TransformerConfig says."""

    window: int | None = None  # tokens that a query sees, its own among them
    sinks: bool = False  # a score of each head that stands in the softmax beside those of the keys
    groups: int | None = None  # key/value heads
    value_channels: int | None = None  # of a head
    value_scale: float = 1.0  # on values
    angles: tuple[int, int] | None = None  # its share, from and to, of the angles of all kinds of layers

    @property
    def plain(self) -> bool:
        """Whether megatron-core's own projections serve."""
        return replace(self, window=None, sinks=False) == PLAIN


PLAIN = Heads()


@dataclass(frozen=True)
class Sized:
    """Builds a projection of other sizes than megatron-core's attention works out."""

    build: Any
    inputs: int | None = None
    outputs: int | None = None

    def __call__(self, inputs: int, outputs: int, **settings: Any) -> nn.Module:
        return self.build(self.inputs or inputs, self.outputs or outputs, **settings)


class GroupedQueryAttention(SelfAttention):
    """megatron-core's attention with key/value heads, value widths and rotary angles of this layer's own."""

    def __init__(self, config: TransformerConfig, submodules: SelfAttentionSubmodules, heads: Heads, **kwargs: Any):
        config = copy.copy(config)
        config.num_query_groups = heads.groups or config.num_query_groups
        self._key, self._value = config.kv_channels, heads.value_channels or config.kv_channels
        queries = config.num_attention_heads
        rows = queries * self._key + config.num_query_groups * (self._key + self._value)
        sized = replace(
            submodules,
            linear_qkv=Sized(submodules.linear_qkv, outputs=rows),
            linear_proj=Sized(submodules.linear_proj, inputs=queries * self._value),
        )
        super().__init__(config=config, submodules=sized, **kwargs)
        self._heads = heads

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Like megatron-core's; of the angles [T, 1, 1, all kinds of layers] this layer's are taken."""
        angles = rotary_pos_emb if self._heads.angles is None else rotary_pos_emb[..., slice(*self._heads.angles)]
        return super().forward(hidden_states, *args, rotary_pos_emb=angles, **kwargs)

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """[T, 1, h, D], [T, 1, k, D] and [T, 1, k, E] of this rank's heads.

        The projection's rows are groups: the queries of one, its key, its value. With more ranks than groups each rank
        gathers the projection, reads its group and keeps its own queries of it.
        """
        mixed, _bias = self.linear_qkv(hidden_states)
        groups, ranks, rank = self.config.num_query_groups, self.world_size, self.pg_collection.tp.rank()
        sharing = max(1, ranks // groups)  # ranks for each group
        if sharing > 1:
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed, group=self.pg_collection.tp)
            mixed = mixed.chunk(groups, -1)[rank // sharing]
        by_group = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        sizes = (by_group.shape[-1] - self._key - self._value, self._key, self._value)
        query, key, value = by_group.split(sizes, -1)
        query = query.unflatten(-1, (-1, self._key)).flatten(2, 3)
        if sharing > 1:
            query = query.chunk(sharing, 2)[rank % sharing]
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        key = key if self.k_layernorm is None else self.k_layernorm(key)
        return query, key, value if self._heads.value_scale == 1.0 else value * self._heads.value_scale


class NormOverHeads(nn.Module):
    """An RMS norm over the channels of all heads together, of which a tensor-parallel rank has a share.

    Every rank holds the whole weight; megatron-core adds up the gradients of norms of queries and keys over the ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        """`hidden_size` is the width of a head and `heads` their number in the whole layer, not in this rank."""
        super().__init__()
        self._heads, self._eps = heads, eps
        self.weight = nn.Parameter(torch.empty(heads * hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x_T1hD: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        own, width = x_T1hD.shape[2:]
        copies = own * group.size() // self._heads  # of each key head, where there are fewer than ranks
        squares = x_T1hD.float().square().sum((2, 3), keepdim=True)
        mean = SumOverRanks.apply(squares, group) / (copies * self._heads * width)
        first = group.rank() // copies * own
        weight = self.weight.view(self._heads, width)[first : first + own]
        return (x_T1hD.float() * (mean + self._eps).rsqrt()).type_as(x_T1hD) * weight


class SumOverRanks(torch.autograd.Function):
    """A sum that every rank goes on with: what they find for it in the backward pass is added up again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: Any) -> Tensor:
    if group.size() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total
