"""The Kunlun cards of a host: the driver's device files, and what `xpu-smi -m` says of each card."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONTROL = "xpuctrl"  # Intel's devices, whose tool has the same name, come without it
BUSY = 0.05  # a card is in use if more of its memory is; an idle one holds up to about 100 MiB of 96 GiB
SECONDS = 20.0


@dataclass(frozen=True)
class Card:
    """One line of `xpu-smi -m`."""

    index: int
    product: str  # P800 OAM, P800 PCIe
    used_mib: int
    total_mib: int

    @property
    def busy(self) -> bool:
        return self.used_mib > BUSY * self.total_mib


def count(dev: Path) -> int:
    """Cards whose device files this host (or container) has."""
    if not (dev / CONTROL).exists():
        return 0
    return sum(1 for path in dev.iterdir() if re.fullmatch(r"xpu\d+", path.name))


def listed() -> list[Card]:
    """What the driver's tool lists; empty where the tool is not there or says something else."""
    tool = shutil.which("xpu-smi") or shutil.which("xpu_smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, "-m"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [card for line in done.stdout.splitlines() if (card := _card(line)) is not None]


def _card(line: str) -> Card | None:
    """Fields, counted from 0: 1 the card's number, 17 and 18 its memory in MiB (used, all), 21 the product, quoted."""
    try:
        fields = shlex.split(line)
        return Card(int(fields[1]), fields[21], int(fields[17]), int(fields[18]))
    except (ValueError, IndexError):
        return None


def form_factor(cards: Sequence[Card]) -> str:
    """oam or pcie. The servers that are sold with eight cards hold OAM modules, so that is what an unknown one is."""
    return "pcie" if cards and all("pcie" in card.product.lower() for card in cards) else "oam"


def is_hygon(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the host has Hygon CPUs, which want other RDMA settings."""
    try:
        return "HygonGenuine" in cpuinfo.read_text()
    except OSError:
        return False
