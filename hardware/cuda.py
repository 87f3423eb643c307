"""What runtimes with CUDA's programming interface share: NVIDIA's own, and those that present themselves as it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from hardware.base import Hardware, HardwareError, MemoryStats
from hardware.host import gib

if TYPE_CHECKING:
    import torch

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
VISIBLE = "CUDA_VISIBLE_DEVICES"


class CudaRuntime(Hardware):
    """Stage 2 over torch.cuda."""

    device_type = "cuda"
    dist_backend = "nccl"
    noun: ClassVar[str] = "GPU"  # what messages call a device

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cuda", local_rank)

    def set_device(self, local_rank: int) -> None:
        import torch

        count = torch.cuda.device_count()
        if local_rank >= count:
            raise HardwareError(
                f"hardware={self.name}: local rank {local_rank} has no {self.noun} of its own; {count} are visible"
            )
        torch.cuda.set_device(local_rank)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def memory(self) -> MemoryStats:
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return MemoryStats(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), total)

    def reset_peak_memory(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def is_out_of_memory(self, error: BaseException) -> bool:
        import torch

        if isinstance(error, torch.OutOfMemoryError):
            return True
        return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)

    def memory_report(self) -> str:
        import torch

        now = self.memory()
        free, total = torch.cuda.mem_get_info()
        return (
            f"tensors of this process hold {gib(now.used)} ({gib(now.peak)} at their peak), its allocator has reserved "
            f"{gib(torch.cuda.memory_reserved())}; {gib(free)} of the device's {gib(total)} are free"
        )


def visible_devices(present: int) -> list[str]:
    """Names of the devices that CUDA_VISIBLE_DEVICES leaves of so many.

    By CUDA's rules: entries after the first invalid one do not count.
    """
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        return [str(index) for index in range(present)]
    seen: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.isdigit():
            if int(entry) >= present:
                break
        elif not entry.startswith(("GPU-", "MIG-")):
            break
        if entry in seen:  # CUDA refuses a list that names a device twice
            return []
        seen.append(entry)
    return seen


def share_of_devices(present: int, first: int, count: int) -> dict[str, str]:
    """The environment of a run that sees `count` of the visible devices, from number `first` on."""
    return {VISIBLE: ",".join(visible_devices(present)[first : first + count])}
