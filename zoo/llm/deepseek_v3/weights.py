"""Where each published DeepSeek-V3 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm.latent import latent_map
from zoo.deepseek_v3.config import DeepseekV3Config


def weight_map(config: DeepseekV3Config) -> WeightMap:
    """The weight map of one configuration."""
    return latent_map(config)
