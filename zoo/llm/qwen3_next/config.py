"""Qwen3-Next's published config keys with the reference class's defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Optional

from engine.llm.delta_net import DeltaNetConfig
from engine.llm.grouped import stepped_layers
from engine.moe.mixture import Mixture


@dataclass
class Qwen3NextConfig(DeltaNetConfig):
    """Keys of a published `config.json`; experts everywhere but in `mlp_only_layers` and where a sparse step skips."""

    SPELLINGS: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}  # transformers 5 writes it so

    model_type: Optional[str] = "qwen3_next"
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 5632  # of the dense layers
    num_hidden_layers: int = 48
    num_attention_heads: int = 16
    num_key_value_heads: Optional[int] = 2
    max_position_embeddings: int = 32768
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False  # the loss of job=forward then includes the balancing loss, as the reference's

    def published_mtp_layers(self) -> int:
        """One, of which config.json says nothing."""
        return 1

    def mixture(self) -> Optional[Mixture]:
        """The experts, in the layers that the reference gives some; None if no layer has any."""
        layers = stepped_layers(self)
        if not self.num_experts or not any(layers):
            return None
        return Mixture(
            experts=self.num_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=layers,
            normalised=self.norm_topk_prob,
            shared_ffn_hidden_size=self.shared_expert_intermediate_size,
            shared_gate=True,
            aux_loss=self.router_aux_loss_coef,
        )
