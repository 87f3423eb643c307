"""A policy that does nothing: what a benchmark gives for free."""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.policy.conventions import Conventions
from eval.policy import Request


class Zero:
    """Zero actions, the gripper as it is when open."""

    name = "zero"
    needs: tuple[str, ...] = ()

    def __init__(self, benchmark: Conventions, cameras: bool = False) -> None:
        self.conventions = dataclasses.replace(
            benchmark, family=self.name, cameras=benchmark.cameras if cameras else (), horizon=10, replan=10
        )
        self._action = np.zeros((10, benchmark.action.size), np.float32)
        if benchmark.action.gripper:
            self._action[:, -1] = benchmark.action.gripper.open

    def infer(self, requests: list[Request]) -> list[np.ndarray]:
        """Ten times nothing."""
        return [self._action.copy() for _ in requests]

    def forget(self, session: str) -> None:
        """There is nothing to forget."""
