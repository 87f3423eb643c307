"""Qwen2: the published config keys with the reference classes' defaults, and what no Qwen2 can have. Free of torch.

Qwen1.5, Qwen2 and Qwen2.5 have the same architecture and the same `model_type`, so their families share this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Optional

from engine.llm import check as shared
from engine.llm.grouped import GroupedConfig, QwenWindows, Switches, stepped_layers
from engine.moe.mixture import Mixture


@dataclass
class SharedKeys(QwenWindows, GroupedConfig):
    """Keys of a published `config.json` that dense and MoE models have, under their published names."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: Optional[int] = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: Optional[int] = None
    max_window_layers: int = 28

    def switches(self) -> Switches:
        return Switches(qkv_bias=True)


@dataclass
class Qwen2Config(SharedKeys):
    """A dense model."""

    model_type: Optional[str] = "qwen2"


@dataclass
class Qwen2MoeConfig(SharedKeys):
    """A model with experts and a shared one, except in `mlp_only_layers` and where `decoder_sparse_step` skips."""

    SPELLINGS: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}  # transformers 5 writes it so

    model_type: Optional[str] = "qwen2_moe"
    hidden_size: int = 2048
    intermediate_size: int = 5632  # of the dense layers
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: Optional[int] = 16
    sliding_window: Optional[int] = 0
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    num_experts: int = 60
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = 5632
    norm_topk_prob: bool = False
    qkv_bias: bool = True
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False  # the loss of job=forward then includes the balancing loss, as the reference's

    def switches(self) -> Switches:
        return Switches(qkv_bias=self.qkv_bias)

    def has_window(self, layer: int) -> bool:
        """Every other one of the first `max_window_layers`, as the reference has it."""
        return layer % 2 == 0 and layer < self.max_window_layers

    def mixture(self) -> Mixture:
        """The experts, in the layers that the reference gives some."""
        return Mixture(
            experts=self.num_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=stepped_layers(self),
            normalised=self.norm_topk_prob,
            shared_ffn_hidden_size=self.shared_expert_intermediate_size,
            shared_gate=True,
            aux_loss=self.router_aux_loss_coef,
        )


def check(model: SharedKeys, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from shared.decoder(model, backend)
    yield from shared.windows(model)
    yield from shared.whole_heads(model)
    if isinstance(model, Qwen2MoeConfig):
        yield from shared.topk(model)
        yield from shared.layers_exist(model, "mlp_only_layers")
