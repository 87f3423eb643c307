"""Published keys that no Qwen3-Next here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import check as shared
from zoo.qwen3_next.config import Qwen3NextConfig


def check(model: Qwen3NextConfig, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from shared.decoder(model, backend)
    if not 0 < model.partial_rotary_factor <= 1:
        yield f"model.partial_rotary_factor={model.partial_rotary_factor}: it must be above 0 and at most 1"
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys > 0 and values % keys:
        yield (
            f"model.linear_num_value_heads={values} must be a multiple of model.linear_num_key_heads={keys}: "
            "each key head serves as many value heads as every other"
        )
    if model.mixture():
        yield from shared.topk(model)
    yield from shared.layers_exist(model, "mlp_only_layers")
