"""Rotations and grippers between conventions: what an evaluation and a policy's processor convert. numpy only.

Rotations: `axis_angle` is a rotation vector in radians; quaternions are unit ones; `euler_xyz` turns about the fixed
axes x, then y, then z (scipy's 'xyz', pybullet's Euler angles); `rot6d_columns` holds the matrix's first column and
then its second (Zhou et al. 2019), `rot6d_rows` the rows of these two columns, that is, interleaved. Formulas in SO(3)
are the textbook's.
"""

from __future__ import annotations

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Gripper

SIZES = {"axis_angle": 3, "quat_xyzw": 4, "quat_wxyz": 4, "euler_xyz": 3, "rot6d_rows": 6, "rot6d_columns": 6}
TINY = 1e-8


def convert_rotation(values: np.ndarray, have: str, want: str) -> np.ndarray:
    """A rotation [..., n] of one kind as another [..., m]. Rotation vectors come with angles of at most pi."""
    return values if have == want else from_matrix(to_matrix(values, have), want)


def to_matrix(values: np.ndarray, kind: str) -> np.ndarray:
    """Rotation matrices [..., 3, 3]. UserError for a kind that is no rotation, ValueError for a wrong size."""
    values = np.asarray(values, dtype=np.float64)
    if kind not in SIZES:
        raise UserError(f"rotation={kind}: it cannot be converted; {', '.join(SIZES)} can")
    if values.shape[-1] != SIZES[kind]:
        raise ValueError(f"{kind} has {SIZES[kind]} numbers, not {values.shape[-1]}")
    if kind == "axis_angle":
        return _rodrigues(values)
    if kind == "euler_xyz":
        x, y, z = (_about(axis, values[..., axis]) for axis in range(3))
        return z @ y @ x
    if kind.startswith("quat"):
        return _quaternion_matrix(values if kind == "quat_xyzw" else np.roll(values, -1, axis=-1))
    columns = values.reshape(*values.shape[:-1], 3, 2)
    if kind == "rot6d_columns":
        columns = np.swapaxes(values.reshape(*values.shape[:-1], 2, 3), -1, -2)
    return _orthonormal(columns)


def from_matrix(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Rotation matrices [..., 3, 3] as `kind` [..., n]."""
    if kind not in SIZES:
        raise UserError(f"rotation={kind}: it cannot be converted; {', '.join(SIZES)} can")
    if kind == "axis_angle":
        return axis_angle_of_quaternion(_matrix_quaternion(matrix))
    if kind == "quat_xyzw":
        return _matrix_quaternion(matrix)
    if kind == "quat_wxyz":
        return np.roll(_matrix_quaternion(matrix), 1, axis=-1)
    if kind == "euler_xyz":
        y = np.arctan2(-matrix[..., 2, 0], np.hypot(matrix[..., 2, 1], matrix[..., 2, 2]))
        free = np.abs(np.abs(y) - np.pi / 2) < 1e-7  # gimbal lock: only a sum is known, and z takes it all
        x = np.where(free, 0.0, np.arctan2(matrix[..., 2, 1], matrix[..., 2, 2]))
        z = np.where(
            free,
            np.arctan2(-matrix[..., 0, 1], matrix[..., 1, 1]),
            np.arctan2(matrix[..., 1, 0], matrix[..., 0, 0]),
        )
        return np.stack([x, y, z], -1)
    columns = matrix[..., :2]
    if kind == "rot6d_columns":
        columns = np.swapaxes(columns, -1, -2)
    return columns.reshape(*matrix.shape[:-2], 6)


def axis_angle_of_quaternion(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector [..., 3] of a unit quaternion [..., 4] (xyzw), with an angle from 0 to 2 pi.

    As robosuite's `quat2axisangle`: q and -q give different vectors, and policies were trained on the one given.
    """
    q = np.asarray(quaternion, dtype=np.float64)
    w = np.clip(q[..., 3:], -1.0, 1.0)
    sine = np.sqrt(1.0 - w * w)
    return np.where(sine < TINY, 0.0, q[..., :3] * (2 * np.arccos(w)) / np.where(sine < TINY, 1.0, sine))


def convert_gripper(value: np.ndarray, have: Gripper, want: Gripper) -> np.ndarray:
    """A gripper's command in other numbers: straight between open and closed, and one of the two if binary."""
    share = (value - have.open) / (have.close - have.open)
    if want.binary:
        share = (share > 0.5).astype(np.float64)
    return want.open + np.clip(share, 0.0, 1.0) * (want.close - want.open)


def _about(axis: int, angle: np.ndarray) -> np.ndarray:
    vector = np.zeros((*angle.shape, 3))
    vector[..., axis] = angle
    return _rodrigues(vector)


def _rodrigues(vector: np.ndarray) -> np.ndarray:
    """exp of [w]x: I + sin(a)/a [w]x + (1 - cos(a))/a^2 [w]x^2."""
    angle = np.linalg.norm(vector, axis=-1)[..., None, None]
    zero = np.zeros_like(vector[..., 0])
    x, y, z = np.moveaxis(vector, -1, 0)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).reshape(*vector.shape[:-1], 3, 3)
    # np.sinc is sin(pi t) / (pi t), which is exact at 0; (1 - cos a) / a^2 is sin(a/2)^2 / (a/2)^2 / 2.
    first, second = np.sinc(angle / np.pi), np.sinc(angle / (2 * np.pi)) ** 2 / 2
    return np.eye(3) + first * cross + second * (cross @ cross)


def _quaternion_matrix(quaternion: np.ndarray) -> np.ndarray:
    x, y, z, w = np.moveaxis(quaternion / np.linalg.norm(quaternion, axis=-1, keepdims=True), -1, 0)
    rows = [
        *(1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)),
        *(2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)),
        *(2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)),
    ]
    return np.stack(rows, -1).reshape(*quaternion.shape[:-1], 3, 3)


def _matrix_quaternion(matrix: np.ndarray) -> np.ndarray:
    """xyzw with w >= 0, by the largest of the four (Shepperd 1978), so that nothing is divided by little."""
    m = np.asarray(matrix, dtype=np.float64)
    d = np.stack([m[..., i, i] for i in range(3)], -1)
    trace = d.sum(-1, keepdims=True)
    squares = np.concatenate([1 + 2 * d - trace, 1 + trace], -1)  # 4 x^2, 4 y^2, 4 z^2, 4 w^2
    products = np.empty((*squares.shape, 4))  # products[i, j] = 4 q_i q_j
    for i in range(4):
        products[..., i, i] = squares[..., i]
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        products[..., i, j] = products[..., j, i] = m[..., i, j] + m[..., j, i]
        products[..., k, 3] = products[..., 3, k] = m[..., j, i] - m[..., i, j]
    best = squares.argmax(-1)[..., None, None]
    chosen = np.take_along_axis(products, best, -2)[..., 0, :]
    chosen = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    return np.where(chosen[..., 3:] < 0, -chosen, chosen)


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    """Gram-Schmidt of two columns [..., 3, 2], and their cross product."""
    a = columns[..., 0] / np.linalg.norm(columns[..., 0], axis=-1, keepdims=True)
    b = columns[..., 1] - (a * columns[..., 1]).sum(-1, keepdims=True) * a
    b = b / np.linalg.norm(b, axis=-1, keepdims=True)
    return np.stack([a, b, np.cross(a, b)], -1)
