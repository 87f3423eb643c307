"""GR00T's training data: demonstrations through its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.backends.sources import source_names
from engine.data.lerobot import ACTION, STATE
from engine.data.resources import cache_dir
from engine.errors import UserError
from engine.policy.data import Parts, PolicyModule
from engine.policy.data import build as build_module
from engine.policy.stand_in import stand_in
from engine.policy.statistics import Statistics
from engine.schema import Run
from zoo.groot_n17.config import GrootN17Config, HeadConfig
from zoo.groot_n17.model import GrootN17
from zoo.groot_n17.processor import Draw, Processor
from zoo.groot_n17.prompts import QWEN_CHAT, Chat, Prompts

VALIDATION_SEED = 0  # runs with other seeds are judged with the same noise and times


def build(run: Run, dp_rank: int, dp_size: int, **given: Any) -> PolicyModule:
    """As `engine.data.loader.build_data`."""
    return build_module(run, dp_rank, dp_size, lambda parts, stream: make(parts, stream, QWEN_CHAT), **given)


def prompts(config: Any, folder: Path, chat: Chat) -> Prompts:
    """As many tokens an image as the backbone has for it."""
    return Prompts(folder, config.vocab_size, config.image_token_id, config.image_tokens, chat)


def make(parts: Parts, stream: str, chat: Chat) -> Processor:
    """The processor of a run, for training or for validation."""
    run, config = parts.run, parts.run.model
    if len(config.embodiments) not in (1, len(source_names(run))):
        raise UserError(
            f"model.embodiments={config.embodiments}: one number, or one for each of the mixture's "
            f"{len(source_names(run))} sources, would be right"
        )
    quiet = parts.log if stream == "train" else lambda line: None
    folder = parts.tokenizer or (Path(run.data.tokenizer).expanduser() if run.data.tokenizer else None)
    folder = folder or stand_in(chat.form, parts.tasks, config.vocab_size, cache_dir(run), quiet)
    draw = Draw(run.seed if stream == "train" else VALIDATION_SEED, stream)
    state, action = parts.statistics[parts.request.state], parts.statistics[parts.request.action]
    return Processor(config, prompts(config, folder, chat), state, action, parts.request.horizon, draw)


def serve(
    config: GrootN17Config, tokenizer: Path, measured: dict[str, Statistics], horizon: int
) -> tuple[nn.Module, Processor]:
    """See `engine.policy.runtime.Serving`."""
    with torch.device("meta"):
        module = GrootN17(config)
    return module, serving(config, prompts(config, tokenizer, QWEN_CHAT), measured, horizon)


def serving(config: HeadConfig, made: Prompts, measured: dict[str, Statistics], horizon: int) -> Processor:
    """A processor that draws noise by the observations' seeds."""
    return Processor(config, made, measured[STATE], measured[ACTION], horizon, Draw(VALIDATION_SEED, "serve"))
