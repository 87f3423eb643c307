"""The toy itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from eval.simulator import Observation

STEP, NEAR, NOISE = 0.1, 0.08, 0.01


class Toy:
    """A point in [-1, 1]^2 that moves as it is told, with a little noise from the episode's seed."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup

    def instruction(self, task: int) -> str:
        """The task's words."""
        return f"reach goal {task}"

    def reset(self, task: int, episode: int, seed: int, look: bool) -> Observation:
        """The goal lies on a circle, the start depends on the episode."""
        angle = 2 * np.pi * task / 3
        self.goal = 0.8 * np.array([np.cos(angle), np.sin(angle)])
        self.random = np.random.default_rng([seed, task, episode])
        self.point = np.random.default_rng(episode).uniform(-0.5, 0.5, 2)
        return self._observation(look)

    def step(self, action: np.ndarray, look: bool) -> Observation:
        """One move."""
        move = STEP * np.clip(action[:2], -1, 1) + NOISE * self.random.normal(size=2)
        self.point = np.clip(self.point + move, -1, 1)
        return self._observation(look)

    def privileged(self) -> dict[str, Any]:
        """Nothing is hidden."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""

    def _observation(self, look: bool) -> Observation:
        images = {}
        if look:
            size = self.setup["resolution"]
            picture = np.zeros((size, size, 3), np.uint8)
            for colour, place in ((0, self.goal), (1, self.point)):
                column, row = ((place * (1, -1) + 1) / 2 * (size - 1)).round().astype(int)
                picture[row, column, colour] = 255
            images = dict.fromkeys(self.setup["cameras"], picture)
        state = np.concatenate([self.point, self.goal]).astype(np.float32)
        return Observation(state, images, bool(np.linalg.norm(self.point - self.goal) < NEAR))
