"""The hardware contract. The rest of the code never asks which device it is on; it asks the plugin.

Stages: 0 detect, check the run, environment of the workers (controller, no torch) · 1 bootstrap the runtime (worker,
before anything else imports torch) · 2 device, memory, process groups · 3 facts with their sources · 4 kernels, config
rewrites and the Megatron adapter. docs/hardware.md walks through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Optional

if TYPE_CHECKING:
    import torch

    from hardware.kernels.registry import Kernel

CONTRACT_VERSION = 1  # rises when a plugin that was right for the old one would be wrong


class HardwareError(Exception):
    """The hardware or its runtime is not what was asked for. One line, for the user."""


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


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


class Rewrite(NamedTuple):
    """A setting that a run cannot have on this hardware, and what it becomes."""

    key: str  # as the user writes it: precision.compile
    value: Any
    reason: str


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
    """One kind of accelerator, or none. The module and the methods of stage 0 must not import torch."""

    name: ClassVar[str]
    contract: ClassVar[int]  # the CONTRACT_VERSION that it was written for, as a number: inherited it would say nothing
    device_type: ClassVar[str]  # torch's name of the device, which a runtime may borrow
    dist_backend: ClassVar[str]  # torch.distributed's name
    presents_as_cuda: ClassVar[bool] = False  # then `auto` asks it before NVIDIA's plugin, which would believe it

    # stage 0
    @abstractmethod
    def detect(self) -> Detection:
        """Whether this hardware is here, without touching it: device files, the driver's listings."""

    def configure(self, run: Any) -> None:
        """Take from the resolved run what `launch_env` needs, and refuse what cannot start.

        The controller calls it once, before there is a run folder; with `run.launcher.name` "print" the hardware may
        be on another machine. Raises HardwareError.
        """

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
    def rewrites(self, run: Any) -> Sequence[Rewrite]:
        """Settings of the resolved run that must be others here. Shown, frozen with the run, and an error under
        hardware.strict=true. Torch-free; what this hardware simply lacks is better said by `supports`.
        """
        return ()

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
