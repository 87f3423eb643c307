"""Published keys that no Kimi K2 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import latent
from zoo.kimi_k2.config import KimiK2Config


def check(model: KimiK2Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from latent.check(model, backend, methods=("noaux_tc",), scoring="sigmoid")
