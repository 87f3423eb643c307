"""Published keys that no Qwen3 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import check as shared
from zoo.qwen3.config import Qwen3MoeConfig, SharedKeys


def check(model: SharedKeys, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from shared.decoder(model, backend)
    yield from shared.windows(model)
    if isinstance(model, Qwen3MoeConfig):
        yield from shared.topk(model)
        yield from shared.layers_exist(model, "mlp_only_layers")
