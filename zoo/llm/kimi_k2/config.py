"""Kimi K2's published config keys with the defaults of the reference class, DeepSeek-V3's. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from engine.llm.latent import NoauxConfig


@dataclass
class KimiK2Config(NoauxConfig):
    """Keys of a published `config.json` under their published names."""

    model_type: Optional[str] = "kimi_k2"
