"""GLM-5 in Megatron parts."""

from __future__ import annotations

from engine.backends.megatron.decoder import sparse_decoder
from engine.backends.megatron.model import CausalLM
from engine.schema import Run
from hardware.base import Hardware
from zoo.glm5.config import Glm5Config


def build(config: Glm5Config, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    return sparse_decoder(config, run, hardware)
