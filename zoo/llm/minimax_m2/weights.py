"""Where each published MiniMax-M2 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm.parts import correction_bias, decoder_map, experts, grouped_attention, layer_norms
from zoo.minimax_m2.config import MiniMaxM2Config

BLOCK, REFERENCE = "block_sparse_moe.", "mlp."  # the reference calls it otherwise than it is published


def weight_map(config: MiniMaxM2Config) -> WeightMap:
    """The weight map of one configuration."""
    hidden, mixture = config.hidden_size, config.mixture()
    heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_channels
    names = ("w1", "w3", "w2")  # gate, up, down
    layer = [
        *layer_norms(hidden),
        *grouped_attention(hidden, heads, groups, head, qk_norm="all"),
        *experts(hidden, mixture.ffn_hidden_size, mixture.experts, prefix=BLOCK, names=names, reference=REFERENCE),
        correction_bias(
            f"{BLOCK}e_score_correction_bias", (mixture.experts,), reference=f"{REFERENCE}e_score_correction_bias"
        ),
    ]
    layers = [layer] * config.num_hidden_layers
    return decoder_map(layers, vocab_size=config.vocab_size, hidden=hidden, tied=config.tie_word_embeddings)
