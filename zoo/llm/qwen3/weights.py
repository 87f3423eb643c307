"""Where each published Qwen3 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm.parts import decoder_map, experts, gated_mlp, grouped_attention, layer_norms
from engine.llm.predictors import numbered, with_predictors
from zoo.qwen3.config import SharedKeys


def weight_map(config: SharedKeys) -> WeightMap:
    """The weight map of one configuration."""
    hidden, mixture, bias = config.hidden_size, config.mixture(), config.attention_bias
    attention = grouped_attention(
        hidden,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_channels,
        bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
    common = [*layer_norms(hidden), *attention]
    dense = [*common, *gated_mlp(hidden, config.intermediate_size)]
    layers = [dense] * config.num_hidden_layers
    if mixture:
        routed = [*common, *experts(hidden, mixture.ffn_hidden_size, mixture.experts)]
        layers = [routed if has else dense for has in mixture.layers]
    own = decoder_map(layers, vocab_size=config.vocab_size, hidden=hidden, tied=config.tie_word_embeddings)
    # No Qwen3 is published with layers for multi-token prediction; new ones are called as DeepSeek-V3's.
    return with_predictors(
        own,
        config.mtp_layers,
        numbered(config.num_hidden_layers),
        layers[config.predictor_layer()] if layers else [],
        hidden,
    )
