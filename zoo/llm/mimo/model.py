"""MiMo in Megatron parts."""

from __future__ import annotations

from engine.backends.megatron.decoder import grouped_query, grouped_query_decoder
from engine.backends.megatron.grouped_query import Heads
from engine.backends.megatron.model import CausalLM
from engine.backends.megatron.rope import Rope, Ropes
from engine.schema import Run
from hardware.base import Hardware
from zoo.mimo.config import FULL, WINDOW, MiMoConfig, MiMoV2FlashConfig


def build(config: MiMoConfig | MiMoV2FlashConfig, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    if isinstance(config, MiMoConfig):
        return grouped_query(config, run, hardware)
    kinds = [kind for kind in (FULL, WINDOW) if kind in config.layer_types]
    ropes = Ropes(*(Rope(config.rotary_channels(k), config.rope_parameters[k]["rope_theta"]) for k in kinds))
    angles = dict(zip(kinds, ropes.shares, strict=True))
    heads = [
        Heads(
            window=window,
            sinks=window is not None,
            groups=config.groups(layer),
            value_channels=config.v_head_dim,
            value_scale=1.0 if config.attention_value_scale is None else config.attention_value_scale,
            angles=angles[config.layer_types[layer]],
        )
        for layer, window in enumerate(config.windows())
    ]
    return grouped_query_decoder(config, run, hardware, qkv_bias=config.attention_bias, heads=heads, rope=ropes)
