"""Where the adapters of a training run begin."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.base import TensorSource
from engine.checkpoint.sources import InitSource
from engine.lora.sources import open_adapter
from engine.schema import Run


def start_adapters(run: Run) -> TensorSource:
    """Those of `task.lora.adapter`, or new ones."""
    adapter = run.task.lora.adapter
    return open_adapter(Path(adapter)) if adapter else fresh_adapters(run.seed)


def fresh_adapters(seed: int) -> InitSource:
    """New adapters as PEFT draws them: A uniform within 1 / sqrt(in) of 0 (Kaiming, a = sqrt 5), B zero."""

    def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(tensor.shape[1])
        if name.endswith("lora_A.weight"):
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            tensor.zero_()

    return InitSource(seed, 0.0, fill)
