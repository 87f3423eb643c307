"""A scripted expert for pick-and-place tasks of LIBERO, which is told where everything is.

It walks through waypoints above, at and over the object and its destination with a proportional controller. Its use is
to show that an evaluation measures what it should: through the right conventions it succeeds, through others it fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Conventions
from eval import protocol
from eval.policy import Request

STEP = 0.05  # metres of an action of 1
GAIN = 1.5
OPEN, CLOSE = -1.0, 1.0
# Where an object is held, against its own position: the tall ones higher, a bowl by its rim.
GRASP = {"salad_dressing": (0, 0, 0.05), "ketchup": (0, 0, 0.05), "akita": (0, -0.045, 0.03)}

Seen = dict[str, np.ndarray]  # poses [7] by name, and the hand's position


class Expert:
    """Plays one episode for each session."""

    name = "libero_expert"
    needs = (protocol.PRIVILEGED,)

    def __init__(self, benchmark: Conventions, cameras: bool = False) -> None:
        """It looks at nothing; with `cameras` it asks for images all the same, for videos and for checks."""
        seen = benchmark.cameras if cameras else ()
        self.conventions = dataclasses.replace(benchmark, family=self.name, cameras=seen, horizon=1, replan=1)
        self._plans: dict[str, _Plan] = {}

    def infer(self, requests: list[Request]) -> list[np.ndarray]:
        """One action [1, 7] for each."""
        return [self._act(request) for request in requests]

    def forget(self, session: str) -> None:
        """The episode is over."""
        self._plans.pop(session, None)

    def _act(self, request: Request) -> np.ndarray:
        known = request.observation.get(protocol.PRIVILEGED)
        state = request.observation.get(protocol.STATE)
        if not isinstance(known, dict) or not isinstance(state, np.ndarray) or state.size < 3:
            raise UserError(f"{self.name} needs '{protocol.PRIVILEGED}' poses and '{protocol.STATE}'")
        if request.step == 0 or request.session not in self._plans:
            objects = known.get("objects") or []
            if len(objects) < 2 or any(name not in known["poses"] for name in objects[:2]):
                raise UserError(f"{self.name} moves one object to another; this task is about {objects}")
            self._plans[request.session] = _Plan(objects[0], objects[1])
        return self._plans[request.session].act(dict(known["poses"]) | {"hand": state[:3].astype(np.float64)})


class _Plan:
    """The waypoints of one episode, as a generator that takes what is seen and yields an action."""

    def __init__(self, thing: str, target: str) -> None:
        self.thing, self.target = thing, target
        self.seen: Seen = {}
        self._steps = self._walk()

    def act(self, seen: Seen) -> np.ndarray:
        self.seen = seen
        return next(self._steps)[None]

    def _walk(self) -> Iterator[np.ndarray]:
        grasp = next((np.array(v, float) for name, v in GRASP.items() if self.thing.startswith(name)), np.zeros(3))
        place = self.seen[self.thing][:3] + grasp
        yield from self._go(_above(place, 0.12), OPEN)
        yield from self._go(place, OPEN, near=0.008)
        yield from self._hold(CLOSE, 8)
        yield from self._go(_above(self.seen["hand"], 0.25), CLOSE, near=0.03)
        # The object, not the hand, must come to lie over the destination.
        target = self.seen[self.target][:3] + (grasp * (1, 1, 0))
        yield from self._go(_above(target, 0.25), CLOSE, near=0.02)
        yield from self._go(_above(target, 0.15), CLOSE, near=0.02, most=30)
        yield from self._hold(OPEN, 10)
        yield from self._go(_above(target, 0.3), OPEN, near=0.03)
        while True:
            yield _action(np.zeros(3), OPEN)

    def _go(self, goal: np.ndarray, gripper: float, near: float = 0.01, most: int = 60) -> Iterator[np.ndarray]:
        for _ in range(most):
            error = goal - self.seen["hand"]
            if np.linalg.norm(error) < near:
                return
            yield _action(error * GAIN, gripper)

    def _hold(self, gripper: float, steps: int) -> Iterator[np.ndarray]:
        for _ in range(steps):
            yield _action(np.zeros(3), gripper)


def _above(point: np.ndarray, metres: float) -> np.ndarray:
    return point + np.array([0, 0, metres])


def _action(move: np.ndarray, gripper: float) -> np.ndarray:
    action = np.zeros(7, np.float32)
    action[:3] = np.clip(move / STEP, -1, 1)
    action[6] = gripper
    return action
