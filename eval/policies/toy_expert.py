"""The toy's expert: it walks straight to the goal, which the state tells."""

from __future__ import annotations

import dataclasses

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Conventions
from eval import protocol
from eval.policy import Request

STEP = 0.1  # of an action of 1


class Expert:
    """It remembers nothing."""

    name = "toy_expert"
    needs: tuple[str, ...] = ()

    def __init__(self, benchmark: Conventions, cameras: bool = False) -> None:
        """It looks at nothing; with `cameras` it asks for images all the same."""
        seen = benchmark.cameras if cameras else ()
        self.conventions = dataclasses.replace(benchmark, family=self.name, cameras=seen, horizon=1, replan=1)

    def infer(self, requests: list[Request]) -> list[np.ndarray]:
        """One action [1, 3] for each."""
        return [self._act(request.observation.get(protocol.STATE)) for request in requests]

    def forget(self, session: str) -> None:
        """There is nothing to forget."""

    @staticmethod
    def _act(state: object) -> np.ndarray:
        if not isinstance(state, np.ndarray) or state.shape != (4,):
            raise UserError(f"toy_expert needs '{protocol.STATE}': x, y, goal_x, goal_y")
        move = (state[2:] - state[:2]).astype(np.float64) / STEP
        return np.append(move / max(1.0, float(np.abs(move).max())), -1.0).astype(np.float32)[None]
