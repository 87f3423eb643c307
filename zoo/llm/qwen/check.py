"""Published keys that no Qwen here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo.qwen.config import QwenConfig

# What every published file has, and what the published model code would do otherwise.
FIXED = {
    "no_bias": (True, "the output projection and the MLP have no biases here"),
    "scale_attn_weights": (True, "attention scores are always scaled here"),
    "rotary_pct": (1.0, "positions rotate whole heads here"),
    "attn_dropout_prob": (0.0, "attention has no dropout here"),
    "emb_dropout_prob": (0.0, "embeddings have no dropout here"),
}


def check(model: QwenConfig, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys, one a line."""
    for key, (right, why) in FIXED.items():
        if (value := getattr(model, key)) != right:
            yield f"model.{key}={value}: {why}; it must be {right}".replace("True", "true").replace("False", "false")
    if model.kv_channels * model.num_attention_heads != model.hidden_size:
        yield (
            f"model.kv_channels={model.kv_channels} x model.num_attention_heads={model.num_attention_heads} must be "
            f"model.hidden_size={model.hidden_size}"
        )
    if model.kv_channels % 2:
        yield f"model.kv_channels={model.kv_channels} must be even, since rotary embeddings turn pairs"
    if model.intermediate_size % model.WIDTHS:
        yield f"model.intermediate_size={model.intermediate_size} must be even: it is the width of gate and up together"
