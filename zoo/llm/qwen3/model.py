"""Qwen3 in Megatron parts."""

from __future__ import annotations

from engine.backends.megatron.decoder import grouped_query_decoder
from engine.backends.megatron.model import CausalLM
from engine.schema import Run
from hardware.base import Hardware
from zoo.qwen3.config import SharedKeys


def build(config: SharedKeys, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    bias = config.attention_bias
    return grouped_query_decoder(config, run, hardware, qkv_bias=bias, output_bias=bias, qk_norm=True)
