"""Kimi K2 in Megatron parts."""

from __future__ import annotations

from engine.backends.megatron.decoder import latent_decoder
from engine.backends.megatron.model import CausalLM
from engine.schema import Run
from hardware.base import Hardware
from zoo.kimi_k2.config import KimiK2Config


def build(config: KimiK2Config, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    return latent_decoder(config, run, hardware, pairs=config.rope_interleave)
