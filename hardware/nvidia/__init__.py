"""NVIDIA GPUs: the CUDA runtime, NCCL between processes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hardware.base import ChipSpec, Detection, HardwareError
from hardware.cuda import VISIBLE, CudaRuntime, share_of_devices, visible_devices
from hardware.host import threads, usable_cores, with_user_values
from hardware.kernels.registry import Kernel
from hardware.nvidia.chips import peak_flops

CAPABILITIES = frozenset({"compile", "pin_memory", "overlap", "fused_adamw", "tf32"})
KERNELS = (
    Kernel("swiglu", "triton", "hardware.nvidia.swiglu:KERNEL", 10, ("triton",)),
    Kernel(
        "linear_cross_entropy",
        "liger",
        "hardware.nvidia.linear_cross_entropy:linear_cross_entropy",
        10,
        ("liger_kernel",),
    ),
    Kernel("split_adamw", "triton", "hardware.nvidia.adamw:KERNEL", 10, ("triton",)),
    # Its products are TF32 at best, so single precision keeps to the reference.
    Kernel("gated_delta_rule", "fla", "hardware.nvidia.delta_rule:KERNEL", 10, ("fla",), dtypes=("bf16",)),
)


class Nvidia(CudaRuntime):
    name = "nvidia"
    contract = 1

    def __init__(self, dev: Path = Path("/dev"), driver: Path = Path("/proc/driver/nvidia/gpus")) -> None:
        """`dev` and `driver` are where the kernel driver shows its devices."""
        self._dev, self._driver = dev, driver

    def detect(self) -> Detection:
        present = self._present()
        if not present:
            return Detection(False, f"the NVIDIA driver shows no GPU in {self._dev} or {self._driver}")
        chosen = os.environ.get(VISIBLE)
        if chosen is None:
            return Detection(True, f"the driver shows {present}", devices=present)
        visible = len(visible_devices(present))
        why = f"{VISIBLE}={chosen} leaves {visible} of {present} GPUs"
        return Detection(visible > 0, why, devices=visible)

    def _present(self) -> int:
        """GPUs that this host (or container: it may see fewer device files than the driver has GPUs) has."""
        if self._dev.is_dir():
            files = sum(1 for path in self._dev.iterdir() if re.fullmatch(r"nvidia\d+", path.name))
            if files:
                return files
        return sum(1 for _ in self._driver.iterdir()) if self._driver.is_dir() else 0

    def launch_env(self, local_rank: int, nproc_per_node: int) -> dict[str, str]:
        return with_user_values({"OMP_NUM_THREADS": threads(usable_cores(), nproc_per_node)})

    def share_env(self, first: int, count: int, runs: int) -> dict[str, str]:
        own = share_of_devices(self._present(), first, count)
        return with_user_values({"OMP_NUM_THREADS": threads(usable_cores(), count * runs)}) | own

    def bootstrap(self) -> None:
        import torch

        if torch.version.cuda is None:
            raise HardwareError(f"hardware=nvidia: this torch {torch.__version__} has no CUDA; install one that has")
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise HardwareError(f"hardware=nvidia: CUDA {torch.version.cuda} does not start: {reason}") from error

    def profiler_activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    def record_memory(self, on: bool) -> None:
        import torch

        torch.cuda.memory._record_memory_history(enabled="all" if on else None)

    def memory_snapshot(self) -> dict[str, Any]:
        import torch

        return torch.cuda.memory._snapshot()

    def spec(self) -> ChipSpec:
        import torch

        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return ChipSpec(device.name, device.total_memory, peak_flops(device.name))

    def supports(self, capability: str) -> bool:
        return capability in CAPABILITIES

    def attention(self) -> Any:
        from hardware.nvidia.attention import NvidiaAttention

        return NvidiaAttention()

    def grouped_matmul(self) -> Any:
        from hardware.kernels.grouped import together

        return together

    def kernels(self) -> tuple[Kernel, ...]:
        return KERNELS

    def megatron(self) -> Any:
        from hardware.megatron import MegatronAdapter

        return MegatronAdapter()
