"""Frames and images between conventions. numpy only. Rotations and grippers: `engine.policy.convert`."""

from __future__ import annotations

import numpy as np

from engine.policy.conventions import Camera

FLIPS = {"none": (), "vertical": (0,), "horizontal": (1,), "rotate180": (0, 1)}


def turn(twist: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """A displacement and a rotation vector [..., 6] seen from another frame, whose axes are turned: R d, R w."""
    return np.concatenate([twist[..., :3] @ rotation.T, twist[..., 3:] @ rotation.T], -1)


def pose_in(frame: np.ndarray, pose: np.ndarray) -> np.ndarray:
    """A pose [4, 4] that is given in the world, in a frame [4, 4] of the world."""
    return np.linalg.inv(frame) @ pose


def flip_image(image: np.ndarray, have: str, want: str) -> np.ndarray:
    """An image [H, W, C] that has been through the flip `have`, as one that has been through `want`."""
    axes = set(FLIPS[have]) ^ set(FLIPS[want])
    return np.ascontiguousarray(np.flip(image, tuple(axes))) if axes else np.ascontiguousarray(image)


def convert_image(image: np.ndarray, have: Camera, want: Camera) -> np.ndarray:
    """An image [H, W, 3] of a benchmark's camera as a policy takes it. Sizes stay: resizing is the policy's."""
    image = flip_image(image, have.flip, want.flip)
    if have.channels != want.channels:
        image = image[..., ::-1]
    return np.ascontiguousarray(np.moveaxis(image, -1, 0) if want.layout == "CHW" else image)
