"""What ranks do for test_published: build a whole model without any memory."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from engine.context import Context
from engine.family import load_dotted
from engine.freeze import load_run
from hardware import registry


def megatron_elements(config: str) -> dict[str, int]:
    """How many elements of each published tensor the Megatron model of a run holds."""
    run = load_run(Path(config))
    hardware = registry.get(run.hardware.name)
    context = Context(run, Path(config).parent, hardware)
    context.start_distributed()
    hardware.megatron().apply()
    from engine.backends.megatron import groups
    from engine.backends.megatron.state import entries

    family = context.family
    groups.start(run)
    try:
        with FakeTensorMode():
            model = load_dotted(family.megatron)(run.model, run, hardware)
            found = entries([model], load_dotted(family.weights)(run.model))
        held: Counter[str] = Counter()
        for block in (block for entry in found for block in entry.blocks):
            held[block.name] += math.prod(block.extent)
        assert sum(held.values()) == sum(entry.parameter.numel() for entry in found)
        return dict(held)
    finally:
        groups.stop()
        context.close()
