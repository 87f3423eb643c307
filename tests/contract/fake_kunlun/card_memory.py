"""Cards that this machine has not got: what is put on one lies in host memory, and what asks for one is answered."""

from __future__ import annotations

import types
from functools import wraps

import torch
import torch._dynamo  # looks at torch.cuda's classes when it is imported, so it comes before they change
from torch.utils._device import _device_constructors

from hardware.cpu.megatron import FACTORIES, CudaOnCpu, is_accelerator, on_cpu

CARD_BYTES = 96 << 30
CALLS = ("current_device", "current_stream", "default_stream", "empty_cache", "get_rng_state", "manual_seed")
CALLS += ("is_current_stream_capturing", "manual_seed_all", "set_device", "set_rng_state", "stream", "synchronize")


def give_devices() -> None:
    """Source: none, a card's own part: torch.cuda answers for cards, each of 98304 MiB as reports say (high)."""
    layer, used = CudaOnCpu(), lambda device=None: 0
    for name in CALLS:
        setattr(torch.cuda, name, getattr(layer, name))
    properties = types.SimpleNamespace(name="GPU", total_memory=CARD_BYTES, major=8, minor=6, multi_processor_count=64)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.mem_get_info = lambda device=None: (CARD_BYTES, CARD_BYTES)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, used)
    torch.cuda.Stream, torch.cuda.Event = layer.Stream, layer.Event


def give_tensors() -> None:
    """Source: none, a card's own part: a tensor for a card is made, moved and named as a card would have it."""
    _device_constructors()  # it remembers torch's own functions, without which `with torch.device(...)` does nothing
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.to, torch.Tensor.type = moving(torch.Tensor.to), naming(torch.Tensor.type)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def moving(to):
    """Source: none, a card's own part: moving to a card stays where it is."""

    @wraps(to)
    def move(self, *args, **kwargs):
        args = tuple(torch.device("cpu") if is_accelerator(arg) else arg for arg in args)
        if is_accelerator(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return to(self, *args, **kwargs)

    return move


def naming(type_of):
    """Source: megatron-core, which tells a card's tensors by the name "torch.cuda.FloatTensor" (certain)."""

    @wraps(type_of)
    def name(self, *args, **kwargs):
        return type_of(self, *args, **kwargs) if args or kwargs else type_of(self).replace("torch.", "torch.cuda.")

    return name
