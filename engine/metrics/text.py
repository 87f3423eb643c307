"""Numbers as people read them."""

from __future__ import annotations

import math


def count(value: float) -> str:
    """1234567 -> 1.23M."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}" if abs(value) < size * 999.5 else f"{value / size:.0f}{unit}"
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def memory(value: float) -> str:
    """Bytes, in the binary units that memory is sold in."""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def duration(seconds: float | None) -> str:
    """8s, 3m 05s, 2h 07m, 3d 04h."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"
