"""Where each published GLM-5 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm.sparse import sparse_map
from zoo.glm5.config import Glm5Config


def weight_map(config: Glm5Config) -> WeightMap:
    """The weight map of one configuration."""
    return sparse_map(config)
