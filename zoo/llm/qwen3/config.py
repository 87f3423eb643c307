"""Qwen3's published config keys with the reference classes' defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Optional

from engine.llm.grouped import GroupedConfig, QwenWindows, Switches, stepped_layers
from engine.llm.predictors import PredictorNames, numbered
from engine.moe.mixture import Mixture


@dataclass
class SharedKeys(QwenWindows, GroupedConfig):
    """Keys of a published `config.json` that dense and MoE models have, under their published names."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: Optional[int] = 32
    head_dim: Optional[int] = 128
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Optional[int] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head_dim = self.head_channels

    def switches(self) -> Switches:
        return Switches(qkv_bias=self.attention_bias, output_bias=self.attention_bias, qk_norm=True)

    def predictor_names(self) -> PredictorNames:
        """No Qwen3 is published with layers for multi-token prediction; new ones are called as DeepSeek-V3's."""
        return numbered(self.num_hidden_layers)


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
    num_key_value_heads: Optional[int] = 4
    head_dim: Optional[int] = None  # None: hidden_size / num_attention_heads
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False  # the loss of job=forward then includes the balancing loss, as the reference's

    def mixture(self) -> Mixture:
        """The experts, in the layers that the reference gives some."""
        return Mixture(
            experts=self.num_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=stepped_layers(self),
            normalised=self.norm_topk_prob,
            aux_loss=self.router_aux_loss_coef,
        )
