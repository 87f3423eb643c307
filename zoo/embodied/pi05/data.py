"""Pi0.5's training data: demonstrations through its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.data.lerobot import ACTION, STATE
from engine.data.resources import cache_dir
from engine.policy.conventions import Conventions
from engine.policy.data import Parts, PolicyModule
from engine.policy.data import build as build_module
from engine.policy.statistics import Statistics
from engine.schema import Run
from zoo.pi05.config import Pi05Config
from zoo.pi05.model import Pi05Policy
from zoo.pi05.processor import Draw, Processor
from zoo.pi05.prompts import Prompts, stand_in

VALIDATION_SEED = 0  # runs with other seeds are judged with the same noise and times


def build(run: Run, dp_rank: int, dp_size: int, **given: Any) -> PolicyModule:
    """As `engine.data.loader.build_data`."""
    return build_module(run, dp_rank, dp_size, make, **given)


def make(parts: Parts, stream: str) -> Processor:
    """The processor of a run, for training or for validation."""
    run, config = parts.run, parts.run.model
    quiet = parts.log if stream == "train" else lambda line: None
    folder = parts.tokenizer or (Path(run.data.tokenizer).expanduser() if run.data.tokenizer else None)
    folder = folder or stand_in(parts.tasks, config.vocab_size, cache_dir(run), quiet)
    prompts = Prompts(folder, config.tokenizer_max_length, config.vocab_size)
    draw = Draw(run.seed if stream == "train" else VALIDATION_SEED, stream)
    state, action = parts.statistics[parts.request.state], parts.statistics[parts.request.action]
    return Processor(config, prompts, state, action, draw)


def serve(
    config: Pi05Config, tokenizer: Path, measured: dict[str, Statistics], own: Conventions
) -> tuple[Any, Processor]:
    """See `engine.policy.runtime.Serving`."""
    prompts = Prompts(tokenizer, config.tokenizer_max_length, config.vocab_size)
    with torch.device("meta"):
        module = Pi05Policy(config)
    return module, Processor(config, prompts, measured[STATE], measured[ACTION], Draw(VALIDATION_SEED, "serve"))
