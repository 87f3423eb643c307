"""Random numbers of a sample: its own, whatever batch, rank or run of several it is in. Free of torch."""

from __future__ import annotations

import hashlib

import numpy as np


def random_of(stream: str, seed: int, sample: int) -> np.random.Generator:
    """The generator of a sample in a stream (train, validation, serve, or a stream of something else's)."""
    digest = hashlib.sha256(f"{stream}/{seed}/{sample}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
