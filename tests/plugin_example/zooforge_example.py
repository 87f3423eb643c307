"""An accelerator that is really the host: the least that a plugin of another package has to say.

Stage 0 runs in the controller, which must not import torch: torch is imported inside the methods that need it.
"""

from __future__ import annotations

import os
from typing import Any

from hardware.base import ChipSpec, Detection, Fact, Hardware, HardwareError, MemoryStats, Rewrite
from hardware.host import gib, with_user_values
from hardware.kernels.registry import Kernel

DEVICES = "EXAMPLE_DEVICES"  # a real plugin counts device files


class Example(Hardware):
    name = "example"
    contract = 1
    device_type = "cpu"
    dist_backend = "gloo"

    # stage 0
    def detect(self) -> Detection:
        devices = int(os.environ.get(DEVICES, "0"))
        return Detection(devices > 0, f"{DEVICES} says {devices}", devices)

    def launch_env(self, local_rank: int, nproc_per_node: int) -> dict[str, str]:
        return with_user_values({"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "EXAMPLE_MODE": "training"})

    # stage 1
    def bootstrap(self) -> None:
        if os.environ.get("EXAMPLE_MODE") == "broken":
            raise HardwareError("hardware=example: EXAMPLE_MODE=broken; training would be right")

    # stage 2
    def device(self, local_rank: int) -> Any:
        import torch

        return torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def memory(self) -> MemoryStats:
        import psutil

        used = psutil.Process().memory_info().rss
        return MemoryStats(used, used, psutil.virtual_memory().total)

    def reset_peak_memory(self) -> None:
        pass

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def memory_report(self) -> str:
        return f"this process holds {gib(self.memory().used)}"

    # stage 3
    def spec(self) -> ChipSpec:
        unknown = Fact(None, "nobody measured it", "unknown")
        return ChipSpec("Example 1", self.memory().total, dict.fromkeys(("fp32", "bf16"), unknown))

    def supports(self, capability: str) -> bool:
        return False

    # stage 4
    def rewrites(self, run: Any) -> list[Rewrite]:
        if run.precision.name == "bf16":
            return [Rewrite("precision.name", "fp32", "this chip adds in single precision only")]
        return []

    def attention(self) -> Any:
        from hardware.kernels.attention import ReferenceAttention

        return ReferenceAttention()

    def kernels(self) -> tuple[Kernel, ...]:
        return (Kernel("swiglu", "example", "hardware.kernels.gated_mlp:REFERENCE", 10),)

    def megatron(self) -> Any:
        from hardware.cpu.megatron import CpuMegatron

        return CpuMegatron()
