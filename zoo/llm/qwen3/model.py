"""Qwen3 in Megatron parts."""

from __future__ import annotations

from torch.nn.functional import silu

from engine.backends.megatron.config import transformer_config
from engine.backends.megatron.experts import Mixture, mixture_config, mixture_layers
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.rope import Rope
from engine.backends.megatron.spec import SpecProvider, attention_spec, block_spec, layer_spec, mlp_spec
from engine.schema import Run
from hardware.base import Hardware
from zoo.qwen3.config import Qwen3MoeConfig, SharedKeys, has_experts


def build(config: SharedKeys, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    mixture = mixture_of(config)
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
        **mixture_config(run, hardware, mixture) if mixture else {},
    )
    rope.configure(transformer)
    provider = SpecProvider(hardware)
    attention = attention_spec(provider, qk_norm=True, output_bias=config.attention_bias)
    dense = mlp_spec(provider)
    if mixture:
        layers = mixture_layers(run, hardware, provider, mixture, attention, dense)
    else:
        layers = layer_spec(provider, attention, dense)
    block = block_spec(transformer, provider, layers)
    return CausalLM(transformer, block, config.vocab_size, config.tie_word_embeddings, rope)


def mixture_of(config: SharedKeys) -> Mixture | None:
    """The experts of a MoE model; None for a dense one."""
    if not isinstance(config, Qwen3MoeConfig):
        return None
    return Mixture(
        experts=config.num_experts,
        topk=config.num_experts_per_tok,
        ffn_hidden_size=config.moe_intermediate_size,
        layers=tuple(has_experts(config, layer) for layer in range(config.num_hidden_layers)),
        normalised=config.norm_topk_prob,
    )
