"""ERNIE 4.5 in Megatron parts."""

from __future__ import annotations

from engine.backends.megatron.decoder import grouped_query_decoder
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.rope import Rope
from engine.schema import Run
from hardware.base import Hardware
from zoo.ernie45.config import SharedKeys


def build(config: SharedKeys, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    bias, rope = config.use_bias, Rope(config.head_channels, config.rope_theta, config.rope_scaling, pairs=True)
    return grouped_query_decoder(config, run, hardware, qkv_bias=bias, output_bias=bias, mlp_bias=bias, rope=rope)
