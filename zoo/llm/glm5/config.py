"""GLM-5's published config keys with the reference class's defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from engine.llm.sparse import FULL, SHARED, SparseConfig


@dataclass
class Glm5Config(SparseConfig):
    """Keys of a published `config.json` under their published names."""

    model_type: Optional[str] = "glm_moe_dsa"
    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    num_key_value_heads: Optional[int] = 64
    max_position_embeddings: int = 202752
    rms_norm_eps: float = 1e-5
    q_lora_rank: Optional[int] = 2048
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_group: Optional[int] = 1
    topk_group: Optional[int] = 1
    index_n_heads: int = 32
    indexer_types: Optional[list[str]] = None  # of each layer: full or shared; None: from the three keys below
    index_topk_pattern: Optional[str] = None  # F and S for each layer
    index_topk_freq: Optional[int] = None  # every so many layers has an indexer ...
    index_skip_topk_offset: Optional[int] = None  # ... after so many that all have one

    def derived(self) -> dict[str, Any]:
        """Published keys that are made of others where they are left out."""
        if self.index_topk_pattern is not None:
            kinds = [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in self.index_topk_pattern]
        else:
            every = max(self.index_topk_freq or 1, 1)
            offset = 2 if self.index_skip_topk_offset is None else self.index_skip_topk_offset
            after = [max(layer - offset + 1, 0) for layer in range(self.num_hidden_layers)]
            kinds = [SHARED if layer % every else FULL for layer in after]
        return super().derived() | {"indexer_types": kinds}

    def indexers(self) -> list[str]:
        """For each layer, whether its indexer is its own."""
        return self.indexer_types or self.derived()["indexer_types"]

    @property
    def index_pairs(self) -> bool:
        """The indexer turns neighbouring channels, as attention does."""
        return True

    def leaders(self) -> list[int]:
        """For each layer, the layer whose indexer chooses its keys."""
        found, leader = [], 0
        for layer, kind in enumerate(self.indexers()):
            leader = layer if kind == FULL else leader
            found.append(leader)
        return found
