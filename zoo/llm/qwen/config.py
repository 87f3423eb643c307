"""The first Qwen's published config keys with the defaults of its published config class. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from engine.llm.qwen2 import Qwen2Config
from engine.schema import ModelConfig


@dataclass
class QwenConfig(ModelConfig):
    """Keys of a published `config.json`, under their published names."""

    WIDTHS: ClassVar[int] = 2  # those of gate and up, which `intermediate_size` adds up

    model_type: Optional[str] = "qwen"
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016  # of gate and up together
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    kv_channels: int = 128  # width of one head
    max_position_embeddings: int = 8192
    seq_length: int = 8192  # longest row of the pretraining; no effect in training
    initializer_range: float = 0.02
    layer_norm_epsilon: float = 1e-6  # added to the mean square in RMSNorm
    tie_word_embeddings: bool = False
    rotary_emb_base: float = 10000.0  # base of the rotary angles
    rotary_pct: float = 1.0  # share of a head that positions rotate
    no_bias: bool = True  # biases on queries, keys and values only
    scale_attn_weights: bool = True  # attention scores are divided by the root of a head's width
    attn_dropout_prob: float = 0.0  # share of attention weights dropped in training
    emb_dropout_prob: float = 0.0  # share of embeddings dropped in training
    use_dynamic_ntk: bool = True  # stretches positions after seq_length; no effect in training
    use_logn_attn: bool = True  # sharpens attention after seq_length; no effect in training

    def decoder(self) -> Qwen2Config:
        """The same model under the keys of Qwen2, the reference."""
        return Qwen2Config(
            name=self.name,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size // self.WIDTHS,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
            initializer_range=self.initializer_range,
            rms_norm_eps=self.layer_norm_epsilon,
            tie_word_embeddings=self.tie_word_embeddings,
            rope_theta=self.rotary_emb_base,
        )

    def reference_keys(self) -> dict[str, Any]:
        return self.decoder().reference_keys()
