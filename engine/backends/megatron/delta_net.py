"""The gated DeltaNet layer: megatron-core's parallel projections around `engine.backends.delta_net`.

megatron-core 0.19 has no such layer. Heads are divided over tensor-parallel ranks. Under context parallelism the
heads of a rank are divided further, so that each rank has some heads of all tokens while the recurrence runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    checkpoint,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.backends.delta_net import Heads, by_head, gated_norm, mix
from engine.backends.megatron.attention import Documents
from engine.backends.megatron.decoder import decoder
from engine.backends.megatron.exchange import to_heads, to_tokens
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.rope import Rope
from engine.backends.megatron.spec import SpecProvider, ZeroCentredRMSNorm, attention_spec
from engine.llm.check import rotary_channels
from engine.llm.delta_net import DeltaNetConfig
from engine.schema import Run
from hardware.base import Hardware
from hardware.kernels.delta_rule import DeltaRule
from hardware.kernels.registry import Choice, choose


@dataclass(frozen=True)
class DeltaNet:
    """What a layer is made of."""

    key_heads: int  # of the whole layer
    heads: Heads
    convolution: int  # tokens that it sees


class GatedDeltaNet(MegatronModule):
    """Gated DeltaNet in the place of megatron-core's SelfAttention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        layer: DeltaNet,
        provider: SpecProvider,
        choice: Choice,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self.heads = layer_number, layer.heads
        self.kernels = {choice.kernel.operation: str(choice)}
        self._rule: DeltaRule = choice.kernel.load()
        self._tp = parallel_state.get_tensor_model_parallel_group()
        self._cp = parallel_state.get_context_parallel_group()
        heads, hidden, total = layer.heads, config.hidden_size, layer.key_heads
        self._own = total // self._tp.size()
        column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
        shared = {"config": config, "init_method": config.init_method, "bias": False}
        self.in_proj_qkvz = column(hidden, total * heads.all, **shared)
        self.in_proj_ba = column(hidden, total * 2 * heads.values, **shared)
        self.conv1d = nn.Module()
        self.conv1d.weight = self._share(self._own * heads.mixed, 1, layer.convolution)
        self.A_log, self.dt_bias = (self._share(self._own * heads.values) for _ in range(2))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.empty(heads.value, dtype=config.params_dtype))
        width = total * heads.values * heads.value
        self.out_proj = row(width, hidden, input_is_parallel=True, skip_bias_add=True, is_expert=False, **shared)
        self._recompute = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def _share(self, *shape: int) -> nn.Parameter:
        """A parameter of this rank's heads."""
        parameter = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Optional[Tensor] = None,
        packed_seq_params: Optional[Documents] = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """[t, 1, hidden] of this rank's share of the tokens, and no bias."""
        heads, documents = self.heads, packed_seq_params
        qkvz, ba = (self._projected(project, hidden_states) for project in (self.in_proj_qkvz, self.in_proj_ba))
        qkv, z = qkvz.split((heads.mixed, heads.all - heads.mixed), -1)
        conv = by_head(self.conv1d.weight, heads)
        decay, step = (x.view(self._own, heads.values) for x in (self.A_log, self.dt_bias))
        if documents.chunks:
            both = to_heads(torch.cat([qkv, ba], -1), self._cp)
            qkv, ba = both.split((heads.mixed, 2 * heads.values), -1)
            conv, decay, step = (x.chunk(self._cp.size())[self._cp.rank()] for x in (conv, decay, step))
        mixed = self._mix(documents, qkv, ba, conv, decay, step)
        if documents.chunks:
            mixed = to_tokens(mixed, self._cp)
        mixed, z = (x.unflatten(-1, (heads.values, heads.value)).flatten(1, 2) for x in (mixed, z))
        # A rank's gradient of the norm is that of its heads.
        weight = copy_to_tensor_model_parallel_region(self.norm.weight, group=self._tp)
        normed = gated_norm(mixed, z, weight, self.config.layernorm_epsilon)
        return self.out_proj(normed.flatten(1).unsqueeze(1))

    def _projected(self, project: nn.Module, hidden: Tensor) -> Tensor:
        """[T, key heads of this rank, channels of one]."""
        return project(hidden)[0].squeeze(1).unflatten(-1, (self._own, -1))

    def _mix(self, documents: Documents, *inputs: Tensor) -> Tensor:
        """[T, key heads here, their values' channels]; tokens beyond the documents get zeros."""
        cu_seqlens, total = documents.cu_seqlens, inputs[0].shape[0]

        def run(qkv: Tensor, ba: Tensor, conv: Tensor, decay: Tensor, step: Tensor) -> Tensor:
            real = (x[: documents.tokens] for x in (qkv, ba))
            out = mix(*real, conv, decay.flatten(), step.flatten(), self.heads, cu_seqlens, self._rule)
            by_key = out.unflatten(1, (-1, self.heads.values)).flatten(2)
            return pad(by_key, (0, 0, 0, 0, 0, total - documents.tokens))

        return checkpoint(run, False, *inputs) if self._recompute and self.training else run(*inputs)


def delta_net_decoder(config: DeltaNetConfig, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of a decoder of gated DeltaNet and gated attention layers, its weights unset."""
    bias, values = config.attention_bias, config.linear_num_value_heads // config.linear_num_key_heads
    choice = choose("gated_delta_rule", hardware.kernels(), run.precision.name, run.kernels.strict)
    layer = DeltaNet(
        config.linear_num_key_heads,
        Heads(config.linear_key_head_dim, config.linear_value_head_dim, values),
        config.linear_conv_kernel_dim,
    )

    def mixers(provider: SpecProvider) -> list[ModuleSpec]:
        linear = delta_net_spec(provider, layer, choice)
        attention = attention_spec(provider, qk_norm=True, output_bias=bias)
        return [linear if here else attention for here in config.linear()]

    settings = {
        "kv_channels": config.head_channels,
        "add_qkv_bias": bias,
        "qk_layernorm": True,
        "attention_output_gate": True,
    }
    rope = Rope(rotary_channels(config), config.rope_theta, config.rope_scaling)
    return decoder(config, run, hardware, rope, mixers, settings, norm=ZeroCentredRMSNorm)


def delta_net_spec(provider: SpecProvider, layer: DeltaNet, choice: Choice) -> ModuleSpec:
    """A gated DeltaNet where a layer's attention would stand."""
    return ModuleSpec(module=GatedDeltaNet, params={"layer": layer, "provider": provider, "choice": choice})
