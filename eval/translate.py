"""Between a policy's conventions and a benchmark's, observation by observation and action by action."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Conventions, Space
from engine.policy.convert import SIZES, convert_gripper, convert_rotation
from eval import protocol
from eval.conversions import convert_image
from eval.simulator import Observation

ROTATION_AT = 3  # both vectors begin with a position, and go on with the rotation


class Translator:
    """What the two sides declare decides; nothing is guessed. The check before a run has refused what cannot be."""

    def __init__(self, policy: Conventions, benchmark: Conventions) -> None:
        self.policy, self.benchmark = policy, benchmark
        self.cameras = {camera.name: camera for camera in benchmark.cameras}

    def observation(self, seen: Observation, prompt: str, privileged: dict[str, Any] | None) -> dict[str, Any]:
        """The message for a policy."""
        message: dict[str, Any] = {
            protocol.PROMPT: prompt,
            protocol.STATE: self._rotated(seen.state, self.benchmark.state, self.policy.state).astype(np.float32),
        }
        for camera in self.policy.cameras:
            have = self.cameras[camera.name]
            message[protocol.image_key(camera.name)] = convert_image(seen.images[camera.name], have, camera)
        if privileged is not None:
            message[protocol.PRIVILEGED] = privileged
        return message

    def action(self, action: np.ndarray) -> np.ndarray:
        """A policy's action [D] as the benchmark takes it."""
        have, want = self.policy.action, self.benchmark.action
        action = self._rotated(action.astype(np.float64), have, want)
        if have.gripper and want.gripper and have.gripper != want.gripper:
            action = np.append(action[:-1], convert_gripper(action[-1], have.gripper, want.gripper))
        return action

    def inverse(self, action: np.ndarray) -> np.ndarray:
        """A benchmark's action as the policy would have given it."""
        return Translator(self.benchmark, self.policy).action(action)

    @staticmethod
    def _rotated(vector: np.ndarray, have: Space, want: Space) -> np.ndarray:
        if have.rotation == want.rotation or "none" in (have.rotation, want.rotation):
            return vector
        if have.rotation not in SIZES:
            raise UserError(f"rotation={have.rotation}: it cannot be converted to {want.rotation}")
        end = ROTATION_AT + SIZES[have.rotation]
        turned = convert_rotation(vector[ROTATION_AT:end], have.rotation, want.rotation)
        return np.concatenate([vector[:ROTATION_AT], turned, vector[end:]])
