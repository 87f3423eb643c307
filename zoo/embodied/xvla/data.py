"""X-VLA's training data: demonstrations through its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.data.lerobot import ACTION
from engine.data.resources import cache_dir
from engine.errors import UserError
from engine.policy.conventions import Conventions
from engine.policy.data import Parts, PolicyModule
from engine.policy.data import build as build_module
from engine.policy.statistics import Statistics
from engine.schema import Run
from zoo.xvla.config import XvlaConfig
from zoo.xvla.layout import check_sources
from zoo.xvla.model import XvlaPolicy
from zoo.xvla.processor import Draw, Processor, domains_of
from zoo.xvla.prompts import Prompts, stand_in

VALIDATION_SEED = 0  # runs with other seeds are judged with the same noise and times
JUDGED = 64  # held-out samples whose times are stratified together


def build(run: Run, dp_rank: int, dp_size: int, **given: Any) -> PolicyModule:
    """As `engine.data.loader.build_data`."""
    return build_module(run, dp_rank, dp_size, make, **given)


def make(parts: Parts, stream: str) -> Processor:
    """The processor of a run, for training or for validation."""
    run, config = parts.run, parts.run.model
    training = stream == "train"
    cameras, tokens = len(parts.conventions.cameras), config.tokens(len(parts.conventions.cameras))
    if tokens > config.max_len_seq:
        raise UserError(f"{cameras} cameras make {tokens} tokens, and model.max_len_seq={config.max_len_seq}; raise it")
    check_sources(parts.sources, config.action_mode)
    if config.domain_ids is not None and len(config.domain_ids) not in (1, len(parts.sources)):
        raise UserError(f"model.domain_ids={config.domain_ids}: one number, or one for each source of data.mixture")
    folder = parts.tokenizer or (Path(run.data.tokenizer).expanduser() if run.data.tokenizer else None)
    quiet = parts.log if training else lambda line: None
    folder = folder or stand_in(parts.tasks, config.vocab_size, cache_dir(run), quiet)
    prompts = Prompts(folder, config.tokenizer_max_length, config.vocab_size)
    draw = Draw(run.seed, stream, run.data.global_batch_size) if training else Draw(VALIDATION_SEED, stream, JUDGED)
    domains = domains_of(config, [source.embodiment for source in parts.sources])
    return Processor(config, prompts, parts.conventions, parts.statistics[parts.request.action], domains, draw)


def serve(
    config: XvlaConfig, tokenizer: Path, measured: dict[str, Statistics], own: Conventions
) -> tuple[Any, Processor]:
    """See `engine.policy.runtime.Serving`."""
    prompts = Prompts(tokenizer, config.tokenizer_max_length, config.vocab_size)
    with torch.device("meta"):
        module = XvlaPolicy(config)
    domains = domains_of(config, [own.embodiment])
    return module, Processor(config, prompts, own, measured[ACTION], domains, Draw(VALIDATION_SEED, "serve"))
