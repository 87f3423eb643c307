"""The worker's side: the expert acts beside its simulator, in the simulator's own environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.policy.conventions import Conventions
from eval import policies, protocol
from eval.episode import derive_seed
from eval.policy import Request
from eval.simulator import Simulator

STATE, ACTION, IMAGES = "state", "action", "images/"


@dataclass(frozen=True)
class Recording:
    """Which episode is recorded. Its arrays go into `file`, without a compression that would take longer."""

    task: int
    episode: int
    horizon: int
    seed: int
    expert: str
    file: str

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from the others."""
        return self.task, self.episode


def record(
    simulator: Simulator, benchmark: Conventions, recording: Recording, alive: Callable[[int], None]
) -> dict[str, Any]:
    """One demonstration: what is seen before each action, and the action. Gives whether it succeeded.

    What the file holds: `state` float32 [T, D], `action` float32 [T, A], `images/<camera>` uint8 [T, H, W, 3]. Nothing
    is written of an episode that failed.
    """
    expert = policies.make(recording.expert, benchmark)
    prompt = simulator.instruction(recording.task)
    seen = simulator.reset(recording.task, recording.episode, derive_seed(recording.seed, "simulator"), True)
    rows: dict[str, list[np.ndarray]] = {}
    step = 0
    while step < recording.horizon and not seen.success:
        message: dict[str, Any] = {protocol.PROMPT: prompt, protocol.STATE: seen.state}
        if protocol.PRIVILEGED in expert.needs:
            message[protocol.PRIVILEGED] = simulator.privileged()
        action = expert.infer([Request(message, step=step)])[0][0].astype(np.float32)
        found = {STATE: seen.state, ACTION: action} | {IMAGES + name: image for name, image in seen.images.items()}
        for name, values in found.items():
            rows.setdefault(name, []).append(values)
        seen = simulator.step(action.astype(np.float64), True)
        step += 1
        alive(step)
    success = bool(seen.success) and step > 0
    if success:
        with Path(recording.file).open("wb") as file:
            np.savez(file, **{name: np.stack(values) for name, values in rows.items()})
    return {"success": success, "steps": step, "prompt": prompt, "reason": None if success else "horizon"}
