"""The host's own cores: no accelerator, gloo between processes."""

from __future__ import annotations

import platform
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware.base import ChipSpec, Detection, Fact, Hardware, MemoryStats
from hardware.host import gib, threads, usable_cores, with_user_values

if TYPE_CHECKING:
    import torch

CAPABILITIES = frozenset({"fused_adamw"})
UNKNOWN = Fact(None, "no figure is published for a CPU's cores", "unknown")


class Cpu(Hardware):
    name = "cpu"
    contract = 1
    device_type = "cpu"
    dist_backend = "gloo"

    def detect(self) -> Detection:
        cores = usable_cores()
        return Detection(True, f"{cores} cores", devices=cores)

    def launch_env(self, local_rank: int, nproc_per_node: int) -> dict[str, str]:
        defaults = {
            "OMP_NUM_THREADS": threads(usable_cores(), nproc_per_node),
            # Megatron-core decorates functions with torch.compile, whose code generator for CPUs needs a C++ compiler.
            "TORCHDYNAMO_DISABLE": "1",
        }
        # The one value that is not the user's: hardware=cpu must behave alike with and without accelerators.
        return with_user_values(defaults) | {"CUDA_VISIBLE_DEVICES": ""}

    def share_env(self, first: int, count: int, runs: int) -> dict[str, str]:
        return with_user_values({"OMP_NUM_THREADS": threads(usable_cores(), count * runs)})

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryStats:
        import psutil  # here, since stage 0 runs before every command and psutil would take a tenth of its time

        return MemoryStats(psutil.Process().memory_info().rss, _peak_resident(), psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None:
        with suppress(OSError):  # elsewhere the peak stays that of the whole process
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, MemoryError):
            return True
        text = str(error)
        return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in text or "not enough memory" in text)

    def memory_report(self) -> str:
        import psutil

        now, host = self.memory(), psutil.virtual_memory()
        return (
            f"this process holds {gib(now.used)} of host memory, {gib(now.peak)} at its peak; "
            f"{gib(host.available)} of {gib(host.total)} are free"
        )

    def spec(self) -> ChipSpec:
        import psutil

        peak = dict.fromkeys(("fp32", "bf16"), UNKNOWN)
        return ChipSpec(_model_name(), psutil.virtual_memory().total, peak)

    def supports(self, capability: str) -> bool:
        return capability in CAPABILITIES

    def attention(self) -> Any:
        from hardware.kernels.attention import ReferenceAttention

        return ReferenceAttention()

    def megatron(self) -> Any:
        from hardware.cpu.megatron import CpuMegatron

        return CpuMegatron()


def _peak_resident() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
