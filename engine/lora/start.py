"""Where the adapters of a training run begin."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.base import TensorSource
from engine.checkpoint.sources import InitSource
from engine.family import Family, load_dotted
from engine.lora.adapter import place_adapters, read_adapter
from engine.lora.sources import open_adapter
from engine.schema import Run


def start_adapters(run: Run, family: Family) -> TensorSource:
    """Those of `task.lora.adapter`, or new ones."""
    if run.task.lora.adapter is None:
        return fresh_adapters(run.seed)
    folder = Path(run.task.lora.adapter)
    return open_adapter(folder, place_adapters(read_adapter(folder), load_dotted(family.weights)(run.model)))


def fresh_adapters(seed: int) -> InitSource:
    """New adapters as PEFT draws them: A uniform within 1 / sqrt(in) of 0 (Kaiming, a = sqrt 5), B zero."""

    def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(tensor.shape[1])
        if name.endswith("lora_A.weight"):
            tensor.uniform_(-bound, bound, generator=generator)
        else:
            tensor.zero_()

    return InitSource(seed, 0.0, fill)
