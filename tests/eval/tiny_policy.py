"""A policy directory of Pi0.5 with random weights, small enough to act in milliseconds, with the toy's conventions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from zoo.pi05.config import Pi05Config
from zoo.pi05.prompts import stand_in
from zoo.pi05.weights import weight_map

from engine.checkpoint.config import config_text, to_published
from engine.family import load_family
from engine.policy.conventions import Conventions
from engine.policy.statistics import save, statistics

CONFIG = Pi05Config(
    **{"name": "acting", "depth": 2, "num_heads": 3, "num_kv_heads": 1, "head_dim": 8, "width": 24, "mlp_dim": 40},
    **{"expert_width": 20, "expert_mlp_dim": 28, "vocab_size": 300, "vision_width": 18, "vision_mlp_dim": 30},
    **{"vision_depth": 1, "vision_heads": 3, "patch_size": 7, "image_size": 21, "chunk_size": 6, "max_action_dim": 7},
    **{"max_state_dim": 9, "tokenizer_max_length": 60, "num_inference_steps": 3},
)


def write(folder: Path, benchmark: Conventions, seed: int = 0) -> Path:
    """A policy that looks at the benchmark's cameras and walks about at random, but always the same way."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = weight_map(CONFIG).published
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config_text(to_published(load_family("pi05"), CONFIG), "F32"))
    dataclasses.replace(benchmark, family="pi05", horizon=CONFIG.chunk_size, replan=4).save(folder)
    random = np.random.default_rng(seed)
    sizes = {"observation.state": benchmark.state.size, "action": benchmark.action.size}
    save({name: statistics([random.uniform(-1, 1, (99, size))]) for name, size in sizes.items()}, folder)
    tokenizer = stand_in(["reach goal 0"], CONFIG.vocab_size, folder.parent / "cache", lambda line: None)
    (folder / "tokenizer").symlink_to(tokenizer)
    return folder
