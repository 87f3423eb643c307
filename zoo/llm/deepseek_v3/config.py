"""DeepSeek-V3's published config keys with the reference class's defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from engine.llm.latent import NoauxConfig


@dataclass
class DeepseekV3Config(NoauxConfig):
    """Keys of a published `config.json` under their published names."""

    model_type: Optional[str] = "deepseek_v3"
