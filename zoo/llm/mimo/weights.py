"""Where each published MiMo tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm import grouped
from engine.llm.parts import (
    Part,
    correction_bias,
    decoder_map,
    experts,
    gated_mlp,
    grouped_attention,
    layer_norms,
    sinks,
)
from zoo.mimo.config import WINDOW, MiMoConfig, MiMoV2FlashConfig


def weight_map(config: MiMoConfig | MiMoV2FlashConfig) -> WeightMap:
    """The weight map of one configuration."""
    if isinstance(config, MiMoConfig):
        return grouped.weight_map(config)
    layers = [_layer(config, layer) for layer in range(config.num_hidden_layers)]
    return decoder_map(layers, vocab_size=config.vocab_size, hidden=config.hidden_size, tied=config.tie_word_embeddings)


def _layer(config: MiMoV2FlashConfig, layer: int) -> list[Part]:
    hidden, heads, mixture = config.hidden_size, config.num_attention_heads, config.mixture()
    widths = {"head": config.head_dim, "value": config.v_head_dim}
    parts = [
        *layer_norms(hidden),
        *grouped_attention(hidden, heads, config.groups(layer), **widths, bias=config.attention_bias),
    ]
    if config.layer_types[layer] == WINDOW:
        parts.append(sinks("self_attn.attention_sink_bias", heads, reference="self_attn.sinks"))
    if not mixture.layers[layer]:
        return [*parts, *gated_mlp(hidden, config.intermediate_size)]
    return [
        *parts,
        *experts(hidden, mixture.ffn_hidden_size, mixture.experts),
        correction_bias("mlp.gate.e_score_correction_bias", (mixture.experts,)),
    ]
