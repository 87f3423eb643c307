"""What every plugin needs to know of the host. Free of torch."""

from __future__ import annotations

import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max": no quota
        pass
    return cores


def threads(cores: int, ranks: int) -> str:
    """OMP_NUM_THREADS of each of so many ranks."""
    return str(max(1, cores // ranks))


def with_user_values(defaults: dict[str, str]) -> dict[str, str]:
    """`defaults`, where a variable that the user has set keeps the user's value."""
    return {key: os.environ.get(key, value) for key, value in defaults.items()}


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB"
