"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2) over flattened, packed rows.

megatron-core's own module takes its positions from the place in the sequence, which packed rows restart, knows no
biases, gives the norms of latents the eps of the layers, and divides the projections to latents over tensor-parallel
ranks, which makes their gradients wrong with its local layers.

Here the projections to latents are whole on every rank. Under sequence parallelism each rank projects its share of the
tokens; the narrow latents, not the wide heads, are what is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from engine.backends.megatron.attention import Documents
from engine.backends.megatron.spec import BiasedRowParallelLinear, SpecProvider

EPS = 1e-6  # of the latents' norms, whatever the layers' own have: so do the published code and the reference


@dataclass(frozen=True)
class Latent:
    """What a latent attention is made of."""

    heads: int
    query_rank: Optional[int]  # None: queries come from the hidden states directly
    rank: int  # of the latent that keys and values share
    plain: int  # channels of a head without positions ...
    rotary: int  # ... and with
    value: int
    scale: float  # on the scores
    magnitude: float = 1.0  # on cosine and sine
    pairs: bool = True  # rotary pairs are neighbours, else the halves
    bias: bool = False  # of the projections to latents and of the output


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank has whole, with megatron-core's way of giving its output."""

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig, bias: bool = False) -> None:
        super().__init__()
        self.is_expert, self.sequence_parallel = False, config.sequence_parallel
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.weight = self._parameter(config, outputs, inputs)
        self.bias = self._parameter(config, outputs) if bias else None

    def _parameter(self, config: TransformerConfig, *shape: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
        # Each rank sees its share of the tokens: megatron-core then adds up the gradients.
        parameter.sequence_parallel = config.sequence_parallel
        return parameter

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return nn.functional.linear(x, self.weight, self.bias), None


class LatentAttention(MegatronModule):
    """Latent attention in the place of megatron-core's SelfAttention; heads are divided over tensor-parallel ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        latent: Latent,
        provider: SpecProvider,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.latent, self.layer_number = latent, layer_number
        hidden, heads = config.hidden_size, latent.heads
        self._group = parallel_state.get_tensor_model_parallel_group()
        column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
        norm = provider.layer_norm()
        shared = {"config": config, "init_method": config.init_method}
        wide = heads * (latent.plain + latent.rotary)
        if latent.query_rank is None:
            self.linear_q_proj = column(hidden, wide, bias=False, **shared)
        else:
            self.linear_q_down_proj = ReplicatedLinear(hidden, latent.query_rank, config, latent.bias)
            self.q_layernorm = norm(config, latent.query_rank, EPS)
            self.linear_q_up_proj = column(latent.query_rank, wide, bias=False, **shared)
        self.linear_kv_down_proj = ReplicatedLinear(hidden, latent.rank + latent.rotary, config, latent.bias)
        self.kv_layernorm = norm(config, latent.rank, EPS)
        self.linear_kv_up_proj = column(latent.rank, heads * (latent.plain + latent.value), bias=False, **shared)
        output = BiasedRowParallelLinear if latent.bias else row
        self.linear_proj = output(
            heads * latent.value,
            hidden,
            bias=latent.bias,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            **shared,
        )
        self.core_attention = provider.core_attention()(config=config, softmax_scale=latent.scale)
        self._recompute = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Optional[Tensor] = None,
        rotary_pos_emb: Optional[Tensor] = None,
        packed_seq_params: Optional[Documents] = None,
        **_: Any,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """[t, 1, hidden] of this rank's share of the tokens, and the output's bias. `rotary_pos_emb` are angles."""
        queries = self._query_latent(hidden_states)
        q = self._queries(queries, rotary_pos_emb)
        k, v = self._keys_values(hidden_states, rotary_pos_emb)
        attend = self._core(hidden_states, queries, rotary_pos_emb, packed_seq_params)
        out = checkpoint(attend, False, q, k, v) if self._recompute and self.training else attend(q, k, v)
        return self.linear_proj(self._learnt(out, q, k, packed_seq_params))

    def _core(
        self, hidden: Tensor, queries: Tensor, angles: Tensor, documents: Optional[Documents]
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """What turns queries, keys and values into [T, 1, heads * value]."""
        return lambda q, k, v: self.core_attention(q, k, v, packed_seq_params=documents)

    def _learnt(self, out: Tensor, q: Tensor, k: Tensor, documents: Optional[Documents]) -> Tensor:
        """`out`, with whatever loss a kind of attention has of its own."""
        return out

    def _query_latent(self, hidden: Tensor) -> Tensor:
        """What queries are made of: their normed latent, or the hidden states."""
        if self.latent.query_rank is None:
            return hidden
        return self.q_layernorm(self.linear_q_down_proj(hidden)[0])

    def _queries(self, latent_T1R: Tensor, angles: Tensor) -> Tensor:
        """[T, 1, heads here, plain + rotary]."""
        up = self.linear_q_proj if self.latent.query_rank is None else self.linear_q_up_proj
        q = up(latent_T1R)[0].unflatten(-1, (-1, self.latent.plain + self.latent.rotary))
        plain, rotary = q.split((self.latent.plain, self.latent.rotary), -1)
        return torch.cat([plain, self._rotated(rotary, angles)], -1)

    def _keys_values(self, hidden: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 1, heads here, plain + rotary] and [T, 1, heads here, value]. All heads share the rotated channels."""
        narrow, rotary = self.linear_kv_down_proj(hidden)[0].split((self.latent.rank, self.latent.rotary), -1)
        kv = self.linear_kv_up_proj(self.kv_layernorm(narrow))[0]
        plain, v = kv.unflatten(-1, (-1, self.latent.plain + self.latent.value)).split(
            (self.latent.plain, self.latent.value), -1
        )
        rotary = self._rotated(self._to_all_heads(rotary).unsqueeze(2), angles)
        return torch.cat([plain, rotary.expand(*plain.shape[:-1], -1)], -1), v.contiguous()

    def _to_all_heads(self, x: Tensor) -> Tensor:
        """All tokens, of which the heads of every tensor-parallel rank have a gradient."""
        if self._group.size() == 1:
            return x
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self._group)
        return copy_to_tensor_model_parallel_region(x, group=self._group)

    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        return rotate(x, angles, self.latent.magnitude, self.latent.pairs)


def rotate(x_T1HR: Tensor, angles_T11R: Tensor, magnitude: float, pairs: bool) -> Tensor:
    """Channels turned by angles (whose halves repeat each other), computed in fp32: first halves, then second halves.

    With `pairs` the channels 2 i and 2 i + 1 turn together, else i and i + R / 2. Where a pair lands does not matter:
    queries and keys agree.
    """
    angle = angles_T11R[..., : angles_T11R.shape[-1] // 2]
    cos, sin = angle.cos() * magnitude, angle.sin() * magnitude
    first, second = (x_T1HR[..., 0::2], x_T1HR[..., 1::2]) if pairs else x_T1HR.chunk(2, -1)
    first, second = first.float(), second.float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_T1HR.dtype)


def latent_spec(provider: SpecProvider, latent: Latent) -> ModuleSpec:
    """Latent self-attention for a layer's specification."""
    return ModuleSpec(module=LatentAttention, params={"latent": latent, "provider": provider})
