"""Where each published ERNIE 4.5 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm.parts import (
    correction_bias,
    decoder_map,
    experts,
    gated_mlp,
    grouped_attention,
    layer_norms,
    shared_expert,
)
from zoo.ernie45.config import SharedKeys


def weight_map(config: SharedKeys) -> WeightMap:
    """The weight map of one configuration."""
    hidden, mixture, bias = config.hidden_size, config.mixture(), config.use_bias
    heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_channels
    attention = grouped_attention(hidden, heads, groups, head, bias=bias, output_bias=bias)
    common = [*layer_norms(hidden), *attention]
    dense = [*common, *gated_mlp(hidden, config.intermediate_size, bias=bias)]
    layers = [dense] * config.num_hidden_layers
    if mixture:
        routed = [
            *common,
            *experts(hidden, mixture.ffn_hidden_size, mixture.experts),
            correction_bias(
                "mlp.moe_statics.e_score_correction_bias",
                (1, mixture.experts),
                reference="mlp.gate.moe_statics.e_score_correction_bias",
            ),
        ]
        if mixture.shared_ffn_hidden_size:
            routed += shared_expert(hidden, mixture.shared_ffn_hidden_size, prefix="mlp.shared_experts.")
        layers = [routed if has else dense for has in mixture.layers]
    return decoder_map(layers, vocab_size=config.vocab_size, hidden=hidden, tied=config.tie_word_embeddings)
