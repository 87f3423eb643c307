"""The parts that layers are built from: megatron-core's own linear layers, our norm and our core attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor
from torch.nn.functional import rms_norm

from engine.backends.megatron import groups
from engine.backends.megatron.attention import CoreAttention
from engine.backends.megatron.grouped_query import PLAIN, GroupedQueryAttention, Heads, NormOverHeads
from hardware.base import Hardware


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, which megatron-core's local wrapper refuses under sequence parallelism.

    The tag makes megatron-core add up the weight's gradient over the tensor-parallel ranks, each of which sees a share
    of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class ZeroCentredRMSNorm(RMSNorm):
    """A norm whose weight is 1 plus its parameter, in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).type_as(x)


class BiasedColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel projection with a bias where `add_bias_linear`, which covers all of a layer's, is off."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class BiasedRowParallelLinear(RowParallelLinear):
    """A row-parallel projection with a bias where `add_bias_linear` is off."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


class SpecProvider(LocalSpecProvider):
    """megatron-core's provider of local parts, with the hardware's attention and one of the norms above."""

    def __init__(self, hardware: Hardware, norm: type[RMSNorm] = RMSNorm) -> None:
        self._hardware, self._norm = hardware, norm

    def layer_norm(self, rms_norm: bool = True, for_qk: bool = False, has_residual: bool = False) -> Any:
        return self._norm

    def core_attention(self) -> Any:
        return self.masked_attention()

    def masked_attention(self, window: int | None = None, sinks: bool = False) -> Any:
        """Core attention with a window and sinks, see `CoreAttention`."""
        return partial(CoreAttention, kernels=self._hardware.attention(), window=window, sinks=sinks)


SHARED_ALONG = ((VocabParallelEmbedding, 0), (ColumnParallelLinear, 0), (RowParallelLinear, 1))


def mark_shares(model: torch.nn.Module) -> None:
    """Mark the matrices that tensor-parallel ranks share, on which the gradient's norm and checkpoints depend.

    megatron-core 0.16 does so only where it also draws initial weights; later versions always.
    """
    for module in model.modules():
        dim = next((dim for kind, dim in SHARED_ALONG if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)


def attention_spec(
    provider: SpecProvider,
    qk_norm: bool | tuple[int, int] = False,
    output_bias: bool = False,
    heads: Heads = PLAIN,
) -> ModuleSpec:
    """Self-attention with grouped queries; optionally with norms of queries and keys, and a bias on the output.

    `qk_norm` is True for a norm of each head, or how many heads queries and keys have for a norm over all of them.
    """
    each = provider.layer_norm(for_qk=True) if qk_norm else None
    norms = [partial(NormOverHeads, heads=n) for n in qk_norm] if isinstance(qk_norm, tuple) else [each, each]
    return ModuleSpec(
        module=SelfAttention if heads.plain else GroupedQueryAttention,
        params={"attn_mask_type": AttnMaskType.causal} | ({} if heads.plain else {"heads": heads}),
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.masked_attention(heads.window, heads.sinks),
            linear_proj=BiasedRowParallelLinear if output_bias else provider.row_parallel_linear(),
            q_layernorm=norms[0],
            k_layernorm=norms[1],
        ),
    )


def mlp_spec(provider: SpecProvider, bias: bool = False) -> Any:
    """The dense MLP; gated and with which activation is for the TransformerConfig to say."""
    parts = MLPSubmodules(
        linear_fc1=BiasedColumnParallelLinear if bias else provider.column_parallel_linear(),
        linear_fc2=BiasedRowParallelLinear if bias else provider.row_parallel_linear(),
    )
    if not hasattr(MLP, "as_mlp_submodule"):  # megatron-core 0.16, on the Kunlun image
        return ModuleSpec(module=MLP, submodules=parts)
    return partial(MLP.as_mlp_submodule, submodules=parts)


def layer_spec(provider: SpecProvider, attention: ModuleSpec, mlp: Any) -> ModuleSpec:
    """A pre-norm layer: norm, attention, add, norm, MLP, add."""
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=provider.layer_norm(has_residual=True),
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=provider.layer_norm(has_residual=True),
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(
    config: TransformerConfig, provider: SpecProvider, layers: ModuleSpec | list[ModuleSpec]
) -> TransformerBlockSubmodules:
    """This pipeline stage's layers, all alike or picked from a list of all, and the norm after the last one."""
    stage = groups.virtual_stage()
    count, first = get_num_layers_to_build(config, stage), get_transformer_layer_offset(config, stage)
    own = layers[first : first + count] if isinstance(layers, list) else [layers] * count
    return TransformerBlockSubmodules(own, provider.layer_norm())
