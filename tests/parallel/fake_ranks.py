"""A model on ranks that do not exist (torch's fake process group): without memory, or loading its weights."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
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


class Reads:
    """What goes through the reader of safetensors files."""

    def __init__(self) -> None:
        self.total = 0  # bytes
        self.held = 0  # of what was read, those that are still held ...
        self.most = 0  # ... and the most that ever were

    def note(self, nbytes: int) -> None:
        self.total += max(0, nbytes)
        self.held += nbytes
        self.most = max(self.most, self.held)


@contextmanager
def listening() -> Iterator[Reads]:
    """Count what is read of safetensors files."""
    from engine.checkpoint.tensor_file import TensorFiles

    reads, rectangle = Reads(), TensorFiles.rectangle

    def counted(self: Any, *args: Any) -> torch.Tensor:
        tensor = rectangle(self, *args)
        reads.note(tensor.nbytes)
        weakref.finalize(tensor, reads.note, -tensor.nbytes)
        return tensor

    TensorFiles.rectangle = counted
    try:
        yield reads
    finally:
        TensorFiles.rectangle = rectangle


def load(config: str, size: int, members: list[int], folder: str) -> list[dict[str, int]]:
    """Some ranks load their share of weights: bytes of the share, bytes read, and the most that was held of these."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from engine.backends import megatron
    from engine.checkpoint.sources import open_weights
    from engine.freeze import load_run
    from hardware import registry

    run = load_run(Path(config))
    family = load_family(run.family).of(run.model.model_type)
    found = []
    for rank in members:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        backend = megatron.build(run, family, registry.get("cpu"), "weights")
        with listening() as reads:
            backend.load_state(open_weights(Path(folder), family, run.model), ("param",))
        share = sum(math.prod(b.extent) * 4 for entry in backend._entries for b in entry.blocks)
        found.append({"share": share, "read": reads.total, "most": reads.most})
        backend.close()
        dist.destroy_process_group()
    return found
