"""Where each published DeepSeek-V3.2 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm.sparse import sparse_map
from zoo.deepseek_v32.config import DeepseekV32Config


def weight_map(config: DeepseekV32Config) -> WeightMap:
    """The weight map of one configuration."""
    return sparse_map(config)
