"""GR00T N1.7's training data: demonstrations through the processor that it shares with N1.6, and its own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.policy.conventions import Conventions
from engine.policy.data import PolicyModule
from engine.policy.data import build as build_module
from engine.policy.groot.data import make, prompts, serving
from engine.policy.groot.processor import Processor
from engine.policy.groot.prompts import QWEN_CHAT
from engine.policy.statistics import Statistics
from engine.schema import Run
from zoo.groot_n17.config import GrootN17Config
from zoo.groot_n17.model import GrootN17


def build(run: Run, dp_rank: int, dp_size: int, **given: Any) -> PolicyModule:
    """As `engine.data.loader.build_data`."""
    return build_module(run, dp_rank, dp_size, lambda parts, stream: make(parts, stream, QWEN_CHAT), **given)


def serve(
    config: GrootN17Config, tokenizer: Path, measured: dict[str, Statistics], own: Conventions
) -> tuple[nn.Module, Processor]:
    """See `engine.policy.runtime.Serving`."""
    with torch.device("meta"):
        module = GrootN17(config)
    return module, serving(config, prompts(config, tokenizer, QWEN_CHAT), measured, own.horizon)
