"""Kunlun P800. XPyTorch presents it as CUDA: torch's device type and torch.distributed's backend are borrowed names.

Written from public sources and proven against a fake runtime (tests/contract); no real card has run it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hardware.base import ChipSpec, Detection, Fact, HardwareError, Rewrite
from hardware.cuda import VISIBLE, CudaRuntime, share_of_devices, visible_devices
from hardware.host import threads, usable_cores, with_user_values
from hardware.kernels.registry import Kernel
from hardware.kunlun import cards, environment

CAPABILITIES = frozenset({"overlap"})
KERNELS = (Kernel("swiglu", "xpytorch", "hardware.kunlun.swiglu:KERNEL", 10, ("torch_xmlir",), ("bf16",)),)
PRESS = Fact(345e12, "press reports; there is no datasheet", "press")
UNKNOWN = Fact(None, "no figure is published", "unknown")
PEAK = {"bf16": UNKNOWN, "fp16": PRESS, "tf32": UNKNOWN, "fp32": UNKNOWN}


class Kunlun(CudaRuntime):
    name = "kunlun"
    contract = 1
    presents_as_cuda = True
    noun = "XPU"

    def __init__(self, dev: Path = Path("/dev"), net: Path = Path("/sys/class/net")) -> None:
        """`dev` is where the driver shows its cards, `net` where the kernel shows network interfaces."""
        self._dev, self._net = dev, net
        self._nodes, self._form, self._hygon = 1, "oam", False
        self._nics, self._socket = environment.NICS, environment.SOCKET

    def detect(self) -> Detection:
        present = cards.count(self._dev)
        if not present:
            return Detection(False, f"there is no {self._dev}/{cards.CONTROL} with a card beside it")
        chosen = os.environ.get(VISIBLE)
        if chosen is None:
            return Detection(True, f"the driver shows {present}", devices=present)
        visible = len(visible_devices(present))
        return Detection(visible > 0, f"{VISIBLE}={chosen} leaves {visible} of {present} XPUs", devices=visible)

    def configure(self, run: Any) -> None:
        if run.hardware.form_factor not in (None, "oam", "pcie"):
            raise HardwareError(f"hardware.form_factor={run.hardware.form_factor} must be oam or pcie")
        here = run.launcher.name != "print"  # what is only printed may be for other machines
        listed = cards.listed() if here or run.hardware.form_factor is None else []
        self._nodes, self._hygon = run.launcher.nodes, cards.is_hygon()
        self._form = run.hardware.form_factor or cards.form_factor(listed)
        self._nics = run.hardware.nics or environment.NICS
        self._socket = run.hardware.socket or environment.SOCKET
        if here:
            self._check(listed)

    def _check(self, listed: Sequence[cards.Card]) -> None:
        """HardwareError, one mistake a line, for what would fail or hang in the workers."""
        problems = list(environment.problems())
        if find_spec("torch_xmlir") is None:
            from hardware.kunlun.runtime import missing

            problems.append(missing())
        if listed and all(card.busy for card in listed):
            held = ", ".join(f"{card.index}: {card.used_mib} of {card.total_mib} MiB" for card in listed)
            problems.append(f"hardware=kunlun: all cards are in use ({held}); xpu-smi shows by whom")
        if self._nodes > 1 and self._net.is_dir():
            problems += self._missing_interfaces()
        if problems:
            raise HardwareError("\n".join(problems))

    def _missing_interfaces(self) -> list[str]:
        values = self.launch_env(0, 1)
        have = sorted(path.name for path in self._net.iterdir())
        wanted = {"hardware.nics": values["BKCL_RDMA_NICS"], "hardware.socket": values["BKCL_SOCKET_IFNAME"]}
        return [
            f"hardware=kunlun: {key}={value}, and this node has only {', '.join(have)}; {key}=... names its own"
            for key, value in wanted.items()
            if set(value.split(",")) - set(have)
        ]

    def launch_env(self, local_rank: int, nproc_per_node: int) -> dict[str, str]:
        cores = {"OMP_NUM_THREADS": threads(usable_cores(), nproc_per_node)}
        own = environment.profile(self._form, self._nodes, self._hygon, self._nics, self._socket)
        return with_user_values(cores | own)

    def share_env(self, first: int, count: int, runs: int) -> dict[str, str]:
        own = share_of_devices(cards.count(self._dev), first, count)
        return with_user_values({"OMP_NUM_THREADS": threads(usable_cores(), count * runs)}) | own

    def bootstrap(self) -> None:
        from hardware.kunlun.runtime import start

        start()

    def spec(self) -> ChipSpec:
        import torch

        # The runtime calls every card "GPU".
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return ChipSpec("Kunlun P800", total, PEAK)

    def supports(self, capability: str) -> bool:
        return capability in CAPABILITIES

    def rewrites(self, run: Any) -> list[Rewrite]:
        from hardware.kunlun.rewrites import rewrites

        return rewrites(run)

    def attention(self) -> Any:
        from hardware.kernels.attention import ReferenceAttention

        return ReferenceAttention()

    def kernels(self) -> tuple[Kernel, ...]:
        return KERNELS

    def megatron(self) -> Any:
        from hardware.kunlun.megatron import KunlunMegatron

        return KunlunMegatron()
