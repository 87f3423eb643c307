"""A model instantiated without memory on ranks that do not exist: torch's fake process group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.family import load_dotted, load_family


def instantiate(config: str, size: int) -> list[dict[str, Any]]:
    """For each rank: its number of parameters, and its blocks of published tensors as (name, offset, extent)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from engine.freeze import load_run
    from hardware import registry

    run = load_run(Path(config))
    family = load_family(run.family).of(run.model.model_type)
    hardware = registry.get("cpu")
    hardware.megatron().apply()
    from engine.backends.megatron import groups
    from engine.backends.megatron.state import entries

    weight_map = load_dotted(family.weights)(run.model)
    found = []
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        groups.start(run)
        try:
            with torch.device("meta"):
                model = load_dotted(family.megatron)(run.model, run, hardware)
            parameters = list(model.parameters())
            assert all(parameter.is_meta for parameter in parameters)
            blocks = [
                (block.name, block.offset, block.extent)
                for entry in entries([model], weight_map)
                if not entry.copies and entry.group.rank() == 0
                for block in entry.blocks
            ]
            found.append({"parameters": sum(math.prod(p.shape) for p in parameters), "blocks": blocks})
        finally:
            groups.stop()
            dist.destroy_process_group()
    return found
