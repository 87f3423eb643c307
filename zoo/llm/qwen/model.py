"""Qwen in Megatron parts."""

from __future__ import annotations

from engine.backends.megatron.decoder import grouped_query
from engine.backends.megatron.model import CausalLM
from engine.schema import Run
from hardware.base import Hardware
from zoo.qwen.config import QwenConfig


def build(config: QwenConfig, run: Run, hardware: Hardware) -> CausalLM:
    """This rank's part of the model, its weights unset."""
    return grouped_query(config.decoder(), run, hardware)
