"""DeepSeek-V3.2's published config keys with the reference class's defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from engine.llm.sparse import SparseConfig


@dataclass
class DeepseekV32Config(SparseConfig):
    """Keys of a published `config.json` under their published names."""

    model_type: Optional[str] = "deepseek_v32"

    @property
    def index_pairs(self) -> bool:
        """The indexer turns the halves of its channels, unlike attention."""
        return False
