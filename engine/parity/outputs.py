"""Two `outputs.safetensors` of job=forward, tensor by tensor and piece by piece: nothing is ever held as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.checkpoint.headers import TensorInfo, by_layer
from engine.errors import UserError
from engine.parity.checks import Check, Limits, worst

PIECE = 4 * 2**20  # elements
# BF16 has no type in numpy: it is the upper half of an fp32 number.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "u1"}
Tensors = dict[str, TensorInfo]


@dataclass(frozen=True)
class Distance:
    """How far B's tensor is from A's. NaN where either holds a number that is not finite and the other differs."""

    largest: float  # absolute error of an element
    norm: float  # of the difference
    norm_a: float

    @property
    def relative(self) -> float:
        return self.norm / max(self.norm_a, 1e-12)


def compare_outputs(a: Tensors, b: Tensors, limits: Limits) -> list[Check]:
    """Outputs, loss, gradients and chosen experts. UserError if they cannot be of the same inputs."""
    common = [name for name in a if name in b]
    if misshapen := [f"{n} is {list(a[n].shape)} in A and {list(b[n].shape)} in B" for n in common if _misfit(a, b, n)]:
        raise UserError(f"A and B are of other inputs or models: {misshapen[0]}; give both the same data.inputs")
    checks = [
        Check(f"tensors only in {side}", "number", len(only), len(only), 0, ", ".join(by_layer(only)[:4]))
        for side, only in (("A", [n for n in a if n not in b]), ("B", [n for n in b if n not in a]))
        if only
    ]
    gradients = [name for name in common if name.startswith("grad.")]
    experts = [name for name in common if name.startswith("experts.")]
    for name in (n for n in common if n not in gradients and n not in experts):
        checks.append(_output(name, distance(a[name], b[name]), limits))
    if gradients:
        errors = [(name.removeprefix("grad."), distance(a[name], b[name]).relative) for name in gradients]
        checks.append(worst("gradients", "norm-wise relative", limits.gradients, errors))
    if experts:
        errors = [(name, other_experts(a[name], b[name])) for name in experts]
        checks.append(worst("experts", "share of tokens", limits.experts, errors))
    return checks


def _misfit(a: Tensors, b: Tensors, name: str) -> bool:
    return a[name].shape != b[name].shape


def _output(name: str, found: Distance, limits: Limits) -> Check:
    if name == "loss":
        return Check(name, "absolute", 1, found.largest, limits.loss)
    if limits.outputs_relative:
        return Check(name, "norm-wise relative", 1, found.relative, limits.outputs)
    return Check(name, "largest absolute", 1, found.largest, limits.outputs)


def distance(a: TensorInfo, b: TensorInfo) -> Distance:
    """The distance of two tensors of one shape, in float64."""
    largest, squares, squares_a = 0.0, 0.0, 0.0
    for piece_a, piece_b in zip(pieces(a), pieces(b), strict=True):
        with np.errstate(invalid="ignore"):
            difference = np.where(piece_a == piece_b, 0.0, piece_a - piece_b)
        largest = float(np.maximum(largest, np.abs(difference).max()))  # keeps NaN, which max() may lose
        squares += float(np.square(difference).sum())
        finite = piece_a[np.isfinite(piece_a)]
        squares_a += float(np.square(finite).sum())
    return Distance(largest, math.sqrt(squares), math.sqrt(squares_a))


def other_experts(a: TensorInfo, b: TensorInfo) -> float:
    """Share of the tokens [B, S, k] whose experts are not the same set."""
    width = a.shape[-1]
    wrong = [
        (np.sort(one.reshape(-1, width)) != np.sort(other.reshape(-1, width))).any(1)
        for one, other in zip(pieces(a, width), pieces(b, width), strict=True)
    ]
    return float(np.concatenate(wrong).mean()) if wrong else 0.0


def pieces(tensor: TensorInfo, multiple: int = 1) -> Iterator[Any]:
    """A tensor's elements in order, in float64; all pieces but the last hold a multiple of so many. UserError if its
    dtype is none of an output.
    """
    kind = TYPES.get(tensor.dtype)
    if kind is None:
        raise UserError(f"{tensor.file}: holds {tensor.dtype}, which no outputs.safetensors does")
    left, size = math.prod(tensor.shape), PIECE // multiple * multiple
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        while left:
            raw = np.fromfile(file, kind, min(left, size))
            if not len(raw):
                raise UserError(f"{tensor.file}: ends before its last tensor does; it is truncated")
            left -= len(raw)
            if tensor.dtype == "BF16":
                raw = (raw.astype(np.uint32) << 16).view(np.float32)
            yield raw.astype(np.float64)
