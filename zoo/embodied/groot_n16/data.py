"""GR00T N1.6's training data: demonstrations through the processor that it shares with N1.7, and its own prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.policy.conventions import Conventions
from engine.policy.data import PolicyModule
from engine.policy.data import build as build_module
from engine.policy.groot.data import make, prompts, serving
from engine.policy.groot.processor import Processor
from engine.policy.groot.prompts import FORM, QWEN, Chat
from engine.policy.statistics import Statistics
from engine.schema import Run
from zoo.groot_n16.config import GrootN16Config
from zoo.groot_n16.model import GrootN16

IMAGE = "<IMG_CONTEXT>"  # Eagle's tokens around an image's, as far as public text tells
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", IMAGE)
EAGLE = QWEN.replace("<|vision_start|><|image_pad|><|vision_end|>", f"<img>{IMAGE}</img>")
FORM_OF_EAGLE = replace(FORM, of="Eagle's", special=SPECIAL, more={"chat_template": EAGLE})
EAGLE_CHAT = Chat(FORM_OF_EAGLE, IMAGE, EAGLE, own=False)


def build(run: Run, dp_rank: int, dp_size: int, **given: Any) -> PolicyModule:
    """As `engine.data.loader.build_data`."""
    return build_module(run, dp_rank, dp_size, lambda parts, stream: make(parts, stream, EAGLE_CHAT), **given)


def serve(
    config: GrootN16Config, tokenizer: Path, measured: dict[str, Statistics], own: Conventions
) -> tuple[nn.Module, Processor]:
    """See `engine.policy.runtime.Serving`."""
    with torch.device("meta"):
        module = GrootN16(config)
    return module, serving(config, prompts(config, tokenizer, EAGLE_CHAT), measured, own.horizon)
