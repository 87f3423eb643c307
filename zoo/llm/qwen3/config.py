"""Qwen3's published config keys with the reference classes' defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from engine.schema import ModelConfig


@dataclass
class SharedKeys(ModelConfig):
    """Keys of a published `config.json` that dense and MoE models have, under their published names."""

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
    bos_token_id: Optional[int] = None
    eos_token_id: Optional[int] = None


@dataclass
class Qwen3Config(SharedKeys):
    """A dense model."""

    model_type: Optional[str] = "qwen3"
    max_window_layers: int = 28


@dataclass
class Qwen3MoeConfig(SharedKeys):
    """A model whose MLPs are experts, except in `mlp_only_layers` and where `decoder_sparse_step` skips."""

    SPELLINGS: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}  # transformers 5 writes it so

    model_type: Optional[str] = "qwen3_moe"
    hidden_size: int = 2048
    intermediate_size: int = 6144  # of the dense layers
    num_hidden_layers: int = 24
    num_key_value_heads: int = 4
    head_dim: Optional[int] = None  # type: ignore[assignment]  # None: hidden_size / num_attention_heads
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False  # the loss of job=forward then includes the balancing loss, as the reference's

    def __post_init__(self) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads


def has_experts(config: SharedKeys, layer: int) -> bool:
    """Whether this layer (from 0) has experts, by the reference's rule."""
    if not isinstance(config, Qwen3MoeConfig):
        return False
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
