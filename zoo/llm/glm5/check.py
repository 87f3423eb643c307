"""Published keys that no GLM-5 here can have, said by the controller. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from engine.llm import sparse
from engine.llm.sparse import FULL, SHARED
from zoo.glm5.config import Glm5Config


def check(model: Glm5Config, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from sparse.check(model, backend)
    if model.indexer_rope_interleave is False:
        yield "model.indexer_rope_interleave=false: GLM-5's indexer turns neighbouring channels; leave it out"
    yield from sparse.kinds(model, "indexer_types", (FULL, SHARED))
    if model.indexers()[:1] != [FULL]:
        yield f"model.indexer_types: there is no layer before the first, whose choice it could take; it must be {FULL}"
