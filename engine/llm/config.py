"""Published config keys that most decoders have. A family's dataclass adds its own, and the reference's defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from engine.schema import ModelConfig


@dataclass
class DecoderConfig(ModelConfig):
    """Keys of a published `config.json` under their published names, with Llama's defaults."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: Optional[int] = None  # None: as many as query heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Optional[dict[str, Any]] = None
    attention_dropout: float = 0.0
    bos_token_id: Optional[int] = None
    eos_token_id: Optional[int] = None

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads

    def windows(self) -> tuple[Optional[int], ...]:
        """For each layer how many tokens a query sees, its own among them; None: all before it."""
        return (None,) * self.num_hidden_layers

    @property
    def head_channels(self) -> int:
        """Channels of an attention head; `head_dim` where a family publishes one."""
        return getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads
