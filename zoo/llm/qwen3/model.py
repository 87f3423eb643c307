"""Qwen3 in Megatron parts."""

from __future__ import annotations

from torch.nn.functional import silu

from engine.backends.megatron.config import transformer_config
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.rope import Rope
from engine.backends.megatron.spec import SpecProvider, attention_spec, block_spec, layer_spec, mlp_spec
from engine.schema import Run
from hardware.base import Hardware
from zoo.qwen3.config import Qwen3Config


def build(config: Qwen3Config, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling)
    transformer = transformer_config(
        run,
        hardware,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        add_qkv_bias=config.attention_bias,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
    )
    rope.configure(transformer)
    provider = SpecProvider(hardware)
    attention = attention_spec(provider, qk_norm=True, output_bias=config.attention_bias)
    block = block_spec(transformer, provider, layer_spec(provider, attention, mlp_spec(provider)))
    return CausalLM(transformer, block, config.vocab_size, config.tie_word_embeddings, rope)
