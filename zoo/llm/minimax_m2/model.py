"""MiniMax-M2 in Megatron parts."""

from __future__ import annotations

from engine.backends.megatron.decoder import grouped_query_decoder
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.rope import Rope
from engine.schema import Run
from hardware.base import Hardware
from zoo.minimax_m2.config import MiniMaxM2Config


def build(config: MiniMaxM2Config, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    rope = Rope(config.rotary_dim, config.rope_theta, config.rope_scaling)
    heads = config.num_attention_heads, config.num_key_value_heads
    return grouped_query_decoder(config, run, hardware, qk_norm=heads, rope=rope)
