"""The numbers of a dataset's or a benchmark's vectors as X-VLA's, and back. numpy.

An arm is ten numbers: x, y, z, the first column of its rotation matrix, the second, and a gripper from 0 (open) to 1
(closed), as lerobot 0.6.1's `LiberoProcessorStep` and `XVLARotation6DToAxisAngleProcessorStep` have them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Conventions, Gripper
from engine.policy.convert import SIZES, convert_gripper, convert_rotation
from engine.policy.statistics import Statistics
from zoo.xvla.spaces import SPACES, ActionSpace

RIGHT = Gripper(open=0.0, close=1.0, binary=False)
TURN = "rot6d_columns"


def refuse_steps(own: Conventions, mode: str, space: ActionSpace) -> None:
    """UserError for relative control with targets that are absolute: a loss near 100, no success (lerobot #3401)."""
    if space.absolute and own.control in ("delta", "delta_of_target"):
        raise UserError(
            f"control={own.control}: model.action_mode={mode} learns absolute poses or angles, and these actions are "
            "steps; record or convert absolute ones, or train steps as they are with model.action_mode=auto"
        )


def check_sources(sources: Sequence[Conventions], mode: str) -> None:
    """UserError for a mixture in which one of the sources has steps, or whose arms are not told alike."""
    space, first = SPACES[mode], sources[0]
    for source in sources:
        refuse_steps(source, mode, space)
        told = source.action.rotation, source.action.gripper, source.state.rotation
        if space.size and told != (first.action.rotation, first.action.gripper, first.state.rotation):
            raise UserError(
                f"data.mixture: the sources have unlike rotations or grippers ({source.embodiment} against "
                f"{first.embodiment}); bring them to one form, or set model.action_mode=auto"
            )


class Actions:
    """A dataset's actions [..., A] to the model's [..., N], and back."""

    def __init__(self, own: Conventions, measured: Statistics, mode: str, space: ActionSpace) -> None:
        """Raises UserError for actions that the mode does not know or that its loss cannot take."""
        refuse_steps(own, mode, space)
        self.space, self.size = space, measured.size
        self.rotation, self.gripper = own.action.rotation, own.action.gripper
        self.arm = 4 + SIZES.get(self.rotation, SIZES[TURN]) if space.arm else 0
        if space.arm and self.size not in (self.arm, 2 * self.arm):
            raise UserError(
                f"action has {self.size} numbers (rotation: {self.rotation}); model.action_mode={mode} takes x y z, a "
                f"rotation ({', '.join(SIZES)}, as data.conventions says) and a gripper for one arm or two; "
                "model.action_mode=auto takes any"
            )
        if space.size and not space.arm and self.size > space.size:
            raise UserError(f"action has {self.size} numbers; model.action_mode={mode} takes at most {space.size}")
        if space.grippers and self.gripper is None:
            _check_unknown(self, measured, mode)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """As the model learns them; what is missing behind them is the model's to fill up."""
        if self.space.arm:
            parts = np.split(values, values.shape[-1] // self.arm, -1)
            values = np.concatenate([_arm(part, self.rotation) for part in parts], -1)
        return self._grippers(values, self.gripper, RIGHT)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """In the dataset's numbers again. A gripper that knows nothing between open and closed is one of the two."""
        arms = self.size // self.arm if self.space.arm else 0
        values = self._grippers(values[..., : arms * self.space.arm or self.size], RIGHT, self.gripper)
        if arms:
            values = np.concatenate([_back(part, self.rotation) for part in np.split(values, arms, -1)], -1)
        return values.astype(np.float32)

    def _grippers(self, values: np.ndarray, have: Gripper | None, want: Gripper | None) -> np.ndarray:
        if have is None or want is None:
            return values
        values = values.copy()
        for channel in self.channels(values.shape[-1]):
            values[..., channel] = convert_gripper(values[..., channel], have, want)
        return values

    def channels(self, size: int) -> list[int]:
        """The grippers among so many numbers, where they are from 0 to 1."""
        return [channel for channel in self.space.grippers if channel < size]


def arm_state(values: np.ndarray, rotation: str, size: int) -> np.ndarray:
    """A state [..., D] as the model reads it: position and rotation of an arm, as ten numbers with an empty gripper.

    States whose rotation is not named, or already of the model's kind, stay as they are; `size` is what fits.
    """
    if rotation not in SIZES or rotation == TURN:
        if values.shape[-1] > size:
            raise UserError(f"state has {values.shape[-1]} numbers, and model.max_state_dim={size}; raise it")
        return values
    end = 3 + SIZES[rotation]
    if values.shape[-1] < end or size < 10:
        raise UserError(f"state has {values.shape[-1]} numbers; x y z and {rotation} are {end}, and ten must fit")
    turn = convert_rotation(values[..., 3:end], rotation, TURN)
    return np.concatenate([values[..., :3], turn, np.zeros_like(values[..., :1])], -1)


def _arm(values: np.ndarray, rotation: str) -> np.ndarray:
    if rotation not in SIZES:
        return values
    return np.concatenate([values[..., :3], convert_rotation(values[..., 3:-1], rotation, TURN), values[..., -1:]], -1)


def _back(values: np.ndarray, rotation: str) -> np.ndarray:
    if rotation not in SIZES:
        return values
    return np.concatenate([values[..., :3], convert_rotation(values[..., 3:9], TURN, rotation), values[..., 9:]], -1)


def _check_unknown(actions: Actions, measured: Statistics, mode: str) -> None:
    """Numbers of a gripper that nobody described have to be shares already."""
    last = [n for n in range(measured.size) if actions.arm and n % actions.arm == actions.arm - 1]
    for channel in last or actions.channels(measured.size):
        low, high = measured.min[channel], measured.max[channel]
        if low < 0 or high > 1:
            raise UserError(
                f"action[{channel}] is a gripper from {low:g} to {high:g}, and model.action_mode={mode} learns shares "
                "from 0 (open) to 1 (closed); data.conventions=DIR names a conventions.json whose action.gripper says "
                "what is open and closed"
            )
