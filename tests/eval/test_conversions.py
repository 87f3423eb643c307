"""Rotations against scipy; grippers, frames and images against arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from engine.errors import UserError
from engine.policy import convert as c
from engine.policy.conventions import Camera, Gripper
from eval import conversions

Rotation = pytest.importorskip("scipy.spatial.transform").Rotation

HALF = math.pi / 2
SPECIAL = [[0, 0, 0], [1e-9, 0, 0], [math.pi, 0, 0], [0, math.pi, 0], [0, 0, -HALF], [0, HALF, 0], [0, -HALF, 0]]


def rotations() -> Rotation:
    """Random ones and those where formulas break."""
    vectors = np.random.default_rng(3).normal(size=(200, 3)) * np.linspace(0.001, 3, 200)[:, None]
    return Rotation.from_rotvec(np.concatenate([vectors, SPECIAL]))


def reference(rotation: Rotation, kind: str) -> np.ndarray:
    matrix = rotation.as_matrix()
    return {
        "axis_angle": lambda: rotation.as_rotvec(),
        "quat_xyzw": lambda: rotation.as_quat(),
        "quat_wxyz": lambda: rotation.as_quat(scalar_first=True),
        "euler_xyz": lambda: rotation.as_euler("xyz"),
        "rot6d_columns": lambda: np.concatenate([matrix[:, :, 0], matrix[:, :, 1]], 1),
        "rot6d_rows": lambda: matrix[:, :, :2].reshape(-1, 6),
    }[kind]()


@pytest.mark.filterwarnings("ignore:Gimbal")
@pytest.mark.parametrize("have, want", itertools.product(c.SIZES, c.SIZES))
def test_every_pair_of_rotations(have: str, want: str) -> None:
    truth = rotations()
    converted = c.convert_rotation(reference(truth, have), have, want)
    assert converted.shape == (len(truth), c.SIZES[want])
    assert np.allclose(c.to_matrix(converted, want), truth.as_matrix(), atol=1e-7)
    if want == "quat_xyzw":
        assert np.allclose(np.abs((converted * truth.as_quat()).sum(-1)), 1, atol=1e-9)
    if want == "axis_angle" and have != want:
        assert (np.linalg.norm(converted, axis=-1) <= math.pi + 1e-9).all()


def test_a_matrix_is_scipys_whatever_the_kind() -> None:
    for kind in c.SIZES:
        assert np.allclose(c.to_matrix(reference(rotations(), kind), kind), rotations().as_matrix(), atol=1e-8), kind


def test_a_quaternion_and_its_opposite_are_told_apart_as_in_robosuite() -> None:
    """By hand: 90 degrees about z is also -270 degrees, that is 270 about -z."""
    half = math.sqrt(0.5)
    assert np.allclose(c.axis_angle_of_quaternion(np.array([0, 0, half, half])), [0, 0, HALF])
    assert np.allclose(c.axis_angle_of_quaternion(-np.array([0, 0, half, half])), [0, 0, -3 * HALF])
    assert np.array_equal(c.axis_angle_of_quaternion(np.array([0, 0, 0, 1.0])), np.zeros(3))


def test_wrong_kinds_and_sizes() -> None:
    with pytest.raises(UserError, match="rotation=joints: it cannot be converted"):
        c.convert_rotation(np.zeros(7), "joints", "axis_angle")
    with pytest.raises(ValueError, match="4 numbers, not 3"):
        c.to_matrix(np.zeros(3), "quat_xyzw")


@pytest.mark.parametrize(
    "value, have, want, expected",
    [
        (1.0, Gripper(-1, 1), Gripper(1, -1), -1.0),
        (-0.5, Gripper(-1, 1), Gripper(1, 0, binary=False), 0.75),
        (0.9, Gripper(1, 0), Gripper(-1, 1), -1.0),
        (3.0, Gripper(-1, 1), Gripper(0, 1, binary=False), 1.0),
    ],
)
def test_grippers(value: float, have: Gripper, want: Gripper, expected: float) -> None:
    assert c.convert_gripper(np.float64(value), have, want) == pytest.approx(expected)


def test_frames() -> None:
    """A quarter turn about z takes x to y; a frame at x = 1 sees the world's origin at -x, turned back."""
    quarter = Rotation.from_euler("z", 90, degrees=True).as_matrix()
    assert np.allclose(conversions.turn(np.array([1, 0, 0, 0, 2, 0.0]), quarter), [0, 1, 0, -2, 0, 0])
    frame = np.eye(4)
    frame[:3, :3], frame[:3, 3] = quarter, [1, 0, 0]
    assert np.allclose(conversions.pose_in(frame, np.eye(4))[:3, 3], [0, 1, 0])


def test_every_flip_from_every_other() -> None:
    upright = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    been = {
        "none": upright,
        "vertical": upright[::-1],
        "horizontal": upright[:, ::-1],
        "rotate180": np.rot90(upright, 2),
    }
    for (have, image), (want, expected) in itertools.product(been.items(), been.items()):
        assert np.array_equal(conversions.flip_image(image, have, want), expected)


def test_channels_and_layout() -> None:
    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    taken = conversions.convert_image(image, Camera("a", 2, 3), Camera("a", 2, 3, layout="CHW", channels="BGR"))
    assert taken.shape == (3, 2, 3) and np.array_equal(taken[0], image[..., 2])
