"""ERNIE 4.5's published config keys with the reference classes' defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from engine.llm.config import DecoderConfig
from engine.moe.mixture import Mixture


@dataclass
class SharedKeys(DecoderConfig):
    """Keys of a published `config.json` that dense and MoE models have, under their published names."""

    vocab_size: int = 103424
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    tie_word_embeddings: bool = True
    pad_token_id: Optional[int] = 0
    bos_token_id: Optional[int] = 1
    eos_token_id: Optional[int] = 2
    use_bias: bool = False  # in every projection


@dataclass
class Ernie45Config(SharedKeys):
    """A dense model."""

    model_type: Optional[str] = "ernie4_5"
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 16
    num_key_value_heads: Optional[int] = 2
    head_dim: Optional[int] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head_dim = self.head_channels


@dataclass
class Ernie45MoeConfig(SharedKeys):
    """A model with experts in every `moe_layer_interval`th layer from `moe_layer_start_index` to `.._end_index`."""

    model_type: Optional[str] = "ernie4_5_moe"
    hidden_size: int = 2560
    intermediate_size: int = 12288  # of the dense layers
    num_hidden_layers: int = 28
    num_attention_heads: int = 20
    num_key_value_heads: Optional[int] = 4
    head_dim: Optional[int] = None  # None: hidden_size / num_attention_heads
    moe_intermediate_size: int = 1536
    moe_k: int = 6  # experts that each token goes to
    moe_num_experts: int = 64  # experts of a layer
    moe_num_shared_experts: int = 2  # they are one expert as wide as all of them
    moe_layer_start_index: int = 1  # the first layer that may have experts
    moe_layer_end_index: int = -1  # the last layer that may have experts; -1: the last of all
    moe_layer_interval: int = 1  # every n-th layer has experts
    moe_norm_min: float = 1e-12  # the weights of a token's experts are divided by no less
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False  # the loss of job=forward then includes the balancing loss, as the reference's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head_dim = self.head_channels
        if self.moe_layer_end_index == -1:
            self.moe_layer_end_index = self.num_hidden_layers - 1

    def mixture(self) -> Optional[Mixture]:
        """The experts, in the layers that the reference gives some."""
        first, last, step = self.moe_layer_start_index, self.moe_layer_end_index, self.moe_layer_interval
        layers = tuple((i + 1) % step == 0 and first <= i <= last for i in range(self.num_hidden_layers))
        if not any(layers):
            return None
        return Mixture(
            experts=self.moe_num_experts,
            topk=self.moe_k,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=layers,
            least_sum=self.moe_norm_min,
            bias=True,
            shared_ffn_hidden_size=self.moe_num_shared_experts * self.moe_intermediate_size or None,
            aux_loss=self.router_aux_loss_coef,
        )
