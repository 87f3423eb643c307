"""Where each published Kimi K2 tensor lives in the Megatron model. Free of torch."""

from __future__ import annotations

from engine.checkpoint.weight_map import WeightMap
from engine.llm.latent import latent_map
from zoo.kimi_k2.config import KimiK2Config


def weight_map(config: KimiK2Config) -> WeightMap:
    """The weight map of one configuration. Layers of multi-token prediction are not in it."""
    return latent_map(config)
