"""Decoders in Megatron parts: what most families are, with their switches."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import silu

from engine.backends.megatron.config import transformer_config
from engine.backends.megatron.experts import mixture_config, mixture_layers
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.rope import Rope
from engine.backends.megatron.spec import SpecProvider, attention_spec, block_spec, layer_spec, mlp_spec
from engine.schema import Run
from hardware.base import Hardware


def grouped_query_decoder(
    config: Any,
    run: Run,
    hardware: Hardware,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    **architecture: Any,
) -> CausalLM:
    """This rank's part of a pre-norm decoder with grouped-query attention, its weights unset.

    `config` has the keys of `engine.llm.config.DecoderConfig`; `config.mixture()` says which layers have experts.
    `architecture` holds TransformerConfig's own names.
    """
    mixture, head = config.mixture(), config.head_channels
    rope = Rope(head, config.rope_theta, config.rope_scaling)
    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": silu,
    }
    transformer = transformer_config(
        run, hardware, **settings | (mixture_config(run, hardware, mixture) if mixture else {}) | architecture
    )
    rope.configure(transformer)
    provider = SpecProvider(hardware)
    attention = attention_spec(provider, qk_norm=qk_norm, output_bias=output_bias)
    dense = mlp_spec(provider)
    if mixture:
        layers = mixture_layers(run, hardware, provider, mixture, attention, dense)
    else:
        layers = layer_spec(provider, attention, dense)
    block = block_spec(transformer, provider, layers)
    return CausalLM(transformer, block, config.vocab_size, config.tie_word_embeddings, rope)
