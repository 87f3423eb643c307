"""The hardware contract. The rest of the code never asks which device it is on; it asks the plugin.

Stages: 0 detect and environment (controller, no torch) · 1 bootstrap the runtime · 2 device, random numbers, memory,
process groups · 3 facts with their sources · 4 kernels, config rewrites and the Megatron adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Optional

if TYPE_CHECKING:
    import torch

    from hardware.kernels.registry import Kernel

CONTRACT_VERSION = 1


class HardwareError(Exception):
    """The hardware or its runtime is not what was asked for. One line, for the user."""


@dataclass(frozen=True)
class Fact:
    """A figure and where it comes from. `value` is None where nobody knows."""

    value: Optional[float]
    source: str
    confidence: str  # measured | vendor | press | unknown


@dataclass(frozen=True)
class Detection:
    """What stage 0 found."""

    available: bool
    why: str
    devices: int = 0  # on this host


@dataclass(frozen=True)
class ChipSpec:
    """What is known of one device."""

    name: str
    memory_bytes: int
    peak_flops: dict[str, Fact]  # by dtype, dense


@dataclass(frozen=True)
class MemoryStats:
    """Bytes, of this process. On a CPU: resident memory."""

    used: int
    peak: int
    total: int


class Hardware(ABC):
    """One kind of accelerator, or none. Methods of stage 0 must not import torch."""

    name: ClassVar[str]
    contract: ClassVar[int] = CONTRACT_VERSION
    device_type: ClassVar[str]
    dist_backend: ClassVar[str]

    # stage 0
    @abstractmethod
    def detect(self) -> Detection: ...

    @abstractmethod
    def launch_env(self, local_rank: int, nproc_per_node: int) -> dict[str, str]:
        """Environment of one worker, set before it imports torch. The user's own values win."""

    def share_env(self, first: int, count: int, runs: int) -> Optional[dict[str, str]]:
        """Environment of one of `runs` runs at a time on this host: it sees `count` of the devices that are visible
        here, from number `first` on, and has its part of the cores. None where devices cannot be divided.
        """
        return None

    # stage 1
    def bootstrap(self) -> None:
        """Bring the runtime up in this process, or raise HardwareError."""

    # stage 2
    @abstractmethod
    def device(self, local_rank: int) -> torch.device: ...

    @abstractmethod
    def set_device(self, local_rank: int) -> None: ...

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def memory(self) -> MemoryStats: ...

    @abstractmethod
    def reset_peak_memory(self) -> None: ...

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool: ...

    @abstractmethod
    def memory_report(self) -> str:
        """One line that says what is allocated."""

    def profiler_activities(self) -> list[Any]:
        """What torch's profiler can see here."""
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU]

    def record_memory(self, on: bool) -> None:
        """Have the allocator keep a history of what it does, where it can."""

    def memory_snapshot(self) -> Optional[dict[str, Any]]:
        """The allocator's segments and, while it is recorded, its history, as plain values; None where it has none."""
        return None

    # stage 3
    @abstractmethod
    def spec(self) -> ChipSpec: ...

    @abstractmethod
    def supports(self, capability: str) -> bool:
        """`compile`, `pin_memory`, `overlap`, `fused_adamw`, `tf32`: what the code may use here."""

    # stage 4
    @abstractmethod
    def attention(self) -> Any:
        """The variable-length attention of this hardware, see `hardware.kernels.attention`."""

    def grouped_matmul(self) -> Any:
        """The grouped matrix product of this hardware, see `hardware.kernels.grouped`; None if it has none."""
        return None

    def kernels(self) -> Sequence[Kernel]:
        """What this hardware offers in the place of the references, see `hardware.kernels.registry`. Torch-free."""
        return ()

    @abstractmethod
    def megatron(self) -> Any:
        """The Megatron adapter, see `hardware.megatron`."""
