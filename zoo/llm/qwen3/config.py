"""Qwen3's published config keys with the reference class's defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from engine.schema import ModelConfig


@dataclass
class Qwen3Config(ModelConfig):
    """Keys of a published `config.json` that decide the architecture, under their published names."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Optional[dict[str, Any]] = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    use_sliding_window: bool = False
    sliding_window: Optional[int] = None
    max_window_layers: int = 28
    bos_token_id: Optional[int] = None
    eos_token_id: Optional[int] = None
