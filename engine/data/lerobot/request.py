"""What a policy asks of a dataset for each sample, and whether the dataset has it. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

from engine.data.lerobot import ACTION, STATE
from engine.data.lerobot.meta import Meta
from engine.errors import UserError
from engine.suggest import did_you_mean


@dataclass(frozen=True)
class Request:
    """The parts of a sample."""

    horizon: int  # actions of a chunk: the frame's own and those of the frames after it
    cameras: Optional[tuple[str, ...]] = None  # None: all that the dataset has
    state: str = STATE
    action: str = ACTION

    def of(self, meta: Meta) -> tuple[str, ...]:
        """The cameras to read, in the policy's order."""
        return meta.cameras if self.cameras is None else self.cameras


def request_of(cameras: Optional[Sequence[str]], horizon: Optional[int], model_horizon: int) -> Request:
    """From `data.cameras` and `data.horizon`; the model's horizon where there is none. Raises UserError."""
    if horizon is not None and horizon < 1:
        raise UserError(f"data.horizon={horizon}: a chunk holds at least 1 action")
    if cameras is not None and (not cameras or len(set(cameras)) < len(cameras)):
        raise UserError(f"data.cameras={list(cameras)}: name each camera once, or leave it out for all")
    return Request(horizon or model_horizon, None if cameras is None else tuple(map(str, cameras)))


def missing(meta: Meta, request: Request) -> Iterator[str]:
    """What the dataset lacks, one a line."""
    for name in request.of(meta):
        if name not in meta.cameras:
            have = ", ".join(meta.cameras) or "none"
            yield f"{meta.folder}: has no camera {name}{did_you_mean(name, meta.cameras)} (its cameras: {have})"
    for name in (request.state, request.action):
        if name not in meta.numbers:
            have = ", ".join(meta.numbers)
            yield f"{meta.folder}: has no feature {name}{did_you_mean(name, meta.numbers)} (its numbers: {have})"


def unlike(metas: Sequence[Meta], request: Request) -> Iterator[str]:
    """Where datasets cannot be in one batch, one a line."""
    first = metas[0]
    for other in metas[1:]:
        for name in (request.state, request.action):
            if first.features[name].shape != other.features[name].shape:
                a, b = (list(meta.features[name].shape) for meta in (first, other))
                yield f"{name} has shape {a} in {first.folder} and {b} in {other.folder}; one policy takes one of them"
        if first.fps != other.fps:
            yield f"{first.folder} has {first.fps:g} frames a second, {other.folder} {other.fps:g}; resample one"
        if request.cameras is None and set(first.cameras) != set(other.cameras):
            yield f"{first.folder} and {other.folder} have other cameras; name those to read with data.cameras"
