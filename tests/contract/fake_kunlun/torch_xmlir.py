"""A stand-in for XPyTorch: what public sources say that it does, over gloo and the CPU.

Each function names the source of what it imitates, and how sure that is. `FAKE_XPYTORCH` lists faults to show.
"""

from __future__ import annotations

import os
import sys
import types

__version__ = "3.6.0.0"
FAULTS = set(os.environ.get("FAKE_XPYTORCH", "").split(","))


def cards() -> int:
    """Source: reports of P800 runs; torch.xpu counts nothing and this is the true count (high)."""
    return int(os.environ.get("FAKE_XPU_CARDS", "2"))


def announce() -> None:
    """Source: reports of P800 runs, the two lines of a healthy start (high)."""
    sys.stderr.write("[XCCL] /opt/xccl/so/libbkcl.so loaded\n")
    if "no-marker" not in FAULTS:
        os.write(1, b"SYMBOL_REWRITE torch success\n")


def patch_cuda() -> None:
    """Source: reports of P800 runs; available, every card is called "GPU", capability 8.6 (high)."""
    import card_memory
    import torch

    card_memory.give_devices()
    card_memory.give_tensors()
    torch.cuda.is_available = lambda: cards() > 0
    torch.cuda.device_count = cards
    torch.cuda.get_device_name = lambda device=None: "GPU"
    torch.cuda.get_device_capability = lambda device=None: (8, 6)


def patch_traps() -> None:
    """Source: reports of P800 runs; event times are 0, stream priorities fail (high); more in operators."""
    import operators
    import torch

    operators.define_swiglu()

    def priority_range() -> None:
        raise RuntimeError("INTERNAL ASSERT FAILED")

    torch.cuda.Stream.priority_range = staticmethod(priority_range)
    torch.cuda.Event.elapsed_time = lambda self, other: 0.0
    operators.refuse_means()
    operators.refuse_asynchronous_copies()


def patch_distributed() -> None:
    """Source: a third-party description of XPyTorch; "nccl" becomes "kccl" and get_backend maps it back (medium)."""
    import torch
    import torch.distributed as dist

    def create(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("kccl", create, devices=["cpu"])
    start, get_backend = dist.init_process_group, dist.get_backend

    def init_process_group(backend=None, *args, **kwargs):
        return start("kccl" if backend == "nccl" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.get_backend = lambda group=None: get_backend(group).replace("kccl", "nccl")
    torch.distributed.is_nccl_available = lambda: "unpatched" not in FAULTS


def patch_compile() -> None:
    """Source: LoongForge's comments; XMLIR_ENABLE_MOCK_TORCH_COMPILE is on by default and compiles nothing (high)."""
    import torch

    torch.compile = lambda model=None, **kwargs: model if model is not None else (lambda inner: inner)


if "import-error" in FAULTS:
    raise ImportError("libxpurt.so.1: cannot open shared object file: No such file or directory\nsecond line")
if "no-count" not in FAULTS:
    _XMLIRC = types.SimpleNamespace(_xpu_get_devices_number=cards)
announce()
if not FAULTS & {"no-marker", "no-count"}:  # these end before torch matters
    for patch in (patch_cuda, patch_traps, patch_distributed, patch_compile):
        patch()
