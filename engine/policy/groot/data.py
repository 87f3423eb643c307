"""Demonstrations through GR00T's processor, for training and for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.backends.sources import source_names
from engine.data.lerobot import ACTION, STATE
from engine.data.resources import cache_dir
from engine.errors import UserError
from engine.policy.data import Parts
from engine.policy.groot.config import HeadConfig
from engine.policy.groot.processor import Draw, Processor
from engine.policy.groot.prompts import Chat, Prompts
from engine.policy.stand_in import stand_in
from engine.policy.statistics import Statistics

VALIDATION_SEED = 0  # runs with other seeds are judged with the same noise and times


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


def serving(config: HeadConfig, made: Prompts, measured: dict[str, Statistics], horizon: int) -> Processor:
    """A processor that draws noise by the observations' seeds."""
    return Processor(config, made, measured[STATE], measured[ACTION], horizon, Draw(VALIDATION_SEED, "serve"))
