"""Published keys that no ERNIE here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import check as shared
from zoo.ernie45.config import Ernie45MoeConfig, SharedKeys


def check(model: SharedKeys, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from shared.decoder(model, backend)
    if isinstance(model, Ernie45MoeConfig):
        yield from shared.topk(model, "moe_k", "moe_num_experts")
        if model.use_bias:
            yield (
                "model.use_bias=true: a model with experts would have biases in its shared experts and its head, which "
                "no published size has and no backend here builds; set it to false"
            )
        if model.moe_layer_interval < 1:
            yield f"model.moe_layer_interval={model.moe_layer_interval}: it must be at least 1"
        if model.mixture() is None:
            yield (
                f"model.moe_layer_start_index={model.moe_layer_start_index}, moe_layer_end_index="
                f"{model.moe_layer_end_index} and moe_layer_interval={model.moe_layer_interval} leave no layer with "
                "experts; name model_type ernie4_5 for a dense model"
            )
