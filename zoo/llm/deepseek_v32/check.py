"""Published keys that no DeepSeek-V3.2 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import sparse
from zoo.deepseek_v32.config import DeepseekV32Config


def check(model: DeepseekV32Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from sparse.check(model, backend)
    if model.indexer_rope_interleave:
        yield "model.indexer_rope_interleave=true: this indexer turns the halves of its channels; leave it out"
