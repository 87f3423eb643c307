"""What a benchmark's adapter must have. Runs in the simulator's own environment: numpy only, never torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.policy.conventions import Conventions


@dataclass
class Observation:
    """What a simulator shows, in the benchmark's conventions."""

    state: np.ndarray  # float32 [D]
    images: dict[str, np.ndarray] = field(default_factory=dict)  # uint8 [H, W, 3] by camera; empty if not looked
    success: bool = False


class Simulator(Protocol):
    """One environment, which plays one episode at a time."""

    conventions: Conventions
    privileged: Callable[[], dict[str, Any]]  # what a real robot would not know

    def reset(self, task: int, episode: int, seed: int, look: bool) -> Observation:
        """Bring a task to the official start of an episode, settled."""

    def step(self, action: np.ndarray, look: bool) -> Observation:
        """One action of the benchmark's conventions; images only if asked to `look`."""

    def instruction(self, task: int) -> str:
        """The words of a task."""

    def close(self) -> None:
        """Free the renderer."""
