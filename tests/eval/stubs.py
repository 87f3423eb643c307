"""Small policies behind the protocol."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from engine.policy.conventions import Conventions, Gripper, Space
from eval.policy import Request

ACTION = Space(("dx", "dy", "gripper"), gripper=Gripper())
CONVENTIONS = Conventions("stub", "stub_arm", state=Space(("x", "y")), action=ACTION, horizon=4, replan=2)


class Echo:
    """Gives the state, the seed and the step back; notes its batches. An odd state is asked for by its first number."""

    name = "echo"
    needs: tuple[str, ...] = ()
    conventions = CONVENTIONS

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.sizes: list[int] = []
        self.forgotten: list[str] = []

    def infer(self, requests: list[Request]) -> list[np.ndarray]:
        self.sizes.append(len(requests))
        time.sleep(self.delay_s)
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> np.ndarray:
        state = request.observation["observation/state"]
        actions = np.zeros((4, 3))
        actions[:, 0], actions[:, 1], actions[:, 2] = state[0], request.seed % 997, request.step
        if state[0] == -1:
            raise ValueError("this state is not for me")
        if state[0] == -2:
            actions[1, 2] = np.nan
        return actions[:, :2] if state[0] == -3 else actions

    def forget(self, session: str) -> None:
        self.forgotten.append(session)


def observation(value: float = 1.0) -> dict[str, object]:
    """What Echo takes."""
    return {
        "observation/state": np.array([value, 0.5], np.float32),
        "observation/image": np.full((5, 7, 3), 9, np.uint8),
        "prompt": "go",
    }


def with_conventions(policy: object, **values: object) -> object:
    """A policy that declares something else."""
    policy.conventions = dataclasses.replace(policy.conventions, **values)  # type: ignore[attr-defined]
    return policy
