"""Published keys that no DeepSeek-V3 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import latent
from zoo.deepseek_v3.config import DeepseekV3Config


def check(model: DeepseekV3Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from latent.check(model, backend, methods=("noaux_tc",), scoring="sigmoid")
