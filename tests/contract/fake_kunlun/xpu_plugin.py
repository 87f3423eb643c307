"""A stand-in for the vendor's plugin of megatron-core."""

from __future__ import annotations

import os

CALLS: list[str] = []


def init_megatron_core_xpu_plugin() -> None:
    """Source: LoongForge's xpu_init.py, the function and its module; what it patches is not public (high)."""
    CALLS.append("init")
    if "plugin-error" in os.environ.get("FAKE_XPYTORCH", ""):
        raise RuntimeError("cannot patch this version")
