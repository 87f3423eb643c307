"""Llama: the published config keys with the reference class's defaults, and what no Llama can have. Free of torch.

Every Llama has the same architecture and the same `model_type`, so the families `llama2` and `llama3` share this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

from engine.llm import check as shared
from engine.llm.grouped import GroupedConfig, Switches


@dataclass
class LlamaConfig(GroupedConfig):
    """Keys of a published `config.json`, under their published names."""

    model_type: Optional[str] = "llama"
    head_dim: Optional[int] = None  # None: hidden_size / num_attention_heads
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: Optional[int] = 1
    eos_token_id: Optional[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head_dim = self.head_channels

    def switches(self) -> Switches:
        return Switches(qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias)


def check(model: LlamaConfig, backend: str) -> Iterator[str]:
    """What is wrong with the model's keys for a backend, one a line."""
    yield from shared.decoder(model, backend)
    yield from shared.whole_heads(model)
