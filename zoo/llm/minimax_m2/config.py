"""MiniMax-M2's published config keys with the reference class's defaults. Free of torch and transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from engine.llm.config import DecoderConfig
from engine.moe.mixture import Mixture


@dataclass
class MiniMaxM2Config(DecoderConfig):
    """Keys of a published `config.json`, under their published names. Every layer has experts and no shared one.

    How many channels of a head are rotated is published as `rotary_dim`, which the reference class does not read: it
    reads `partial_rotary_factor`, which then follows. Either may be given; neither means all of a head.
    """

    model_type: Optional[str] = "minimax_m2"
    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536  # of one expert
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: Optional[int] = 8
    head_dim: int = 128
    max_position_embeddings: int = 196608
    rope_theta: float = 5000000.0
    rotary_dim: Optional[int] = None  # channels of a head that positions rotate; None: from partial_rotary_factor
    partial_rotary_factor: Optional[float] = None  # share of a head that positions rotate; None: from rotary_dim
    bos_token_id: Optional[int] = 200034
    eos_token_id: Optional[int] = 200020
    num_experts_per_tok: int = 8
    num_local_experts: int = 256  # experts of a layer

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial_rotary_factor is None:
            self.partial_rotary_factor = (self.rotary_dim or self.head_dim) / self.head_dim
        if self.rotary_dim is None:
            self.rotary_dim = int(self.head_dim * self.partial_rotary_factor)

    def mixture(self) -> Mixture:
        """The experts of every layer."""
        return Mixture(
            experts=self.num_local_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden_size=self.intermediate_size,
            layers=(True,) * self.num_hidden_layers,
            score_function="sigmoid",
            bias=True,
        )
