"""What X-VLA's actions are made of, for each `model.action_mode`: losses by channel, grippers. Free of torch.

Source: lerobot 0.6.1 `action_hub.py`, whose sums of means over groups of channels are one sum with these weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ActionSpace:
    """A vector of `size` numbers. The loss is the sum over channels of weight times error, averaged over steps."""

    size: int  # 0: as many as the data have
    weights: tuple[float, ...] = ()  # by channel; none: all alike, the mean
    grippers: tuple[int, ...] = ()  # given as logits: cross-entropy, hidden from the input, a sigmoid at the output
    arm: int = 0  # numbers of one arm: x y z, two columns of a rotation matrix, gripper
    absolute: bool = True  # targets are poses or angles, never steps towards them


def _groups(size: int, *groups: tuple[tuple[int, ...], float]) -> tuple[float, ...]:
    """The weight of each channel where each group's mean has one."""
    found = dict.fromkeys(range(size), 0.0)
    for channels, weight in groups:
        found.update(dict.fromkeys(channels, weight / len(channels)))
    return tuple(found.values())


XYZ = ((0, 1, 2), 500.0), ((10, 11, 12), 500.0)
TURN = ((3, 4, 5, 6, 7, 8), 10.0), ((13, 14, 15, 16, 17, 18), 10.0)
EE6D, JOINT = (9, 19), (6, 13)
JOINTS = tuple(channel for channel in range(14) if channel not in JOINT)

SPACES = {
    "ee6d": ActionSpace(20, _groups(20, *XYZ, *TURN, (EE6D, 1.0)), EE6D, arm=10),
    "agibot_ee6d": ActionSpace(20, _groups(20, *XYZ, *TURN, (EE6D, 10.0)), arm=10),
    "joint": ActionSpace(14, _groups(14, (JOINTS, 1.0), (JOINT, 0.1)), JOINT),
    "auto": ActionSpace(0, absolute=False),
}
