"""What a dataset says of its own conventions: what a policy that learns from it will read and give. Free of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from engine.data.lerobot.meta import Meta
from engine.data.lerobot.request import Request
from engine.policy.conventions import FILE, Camera, Conventions, Space, load

UNKNOWN = "unknown"


def conventions_of(family: str, metas: Sequence[Meta], request: Request, given: Optional[str] = None) -> Conventions:
    """The conventions of a policy of `family` that is trained on datasets.

    They come from the folder `given` or from the first dataset's meta/conventions.json, as a recorder that knows its
    simulator writes it. Otherwise names, sizes and rates are the dataset's, and what no LeRobot dataset says
    (embodiment, control) is unknown: whoever evaluates the policy has to say it. Raises UserError for a file that is
    not understood.
    """
    meta = metas[0]
    own = dict.fromkeys(("family", "horizon", "replan"))
    own.update(family=family, horizon=request.horizon, replan=request.horizon)
    folder = Path(given).expanduser() if given else meta.folder / "meta"
    if given or (folder / FILE).is_file():
        known = load(folder)
        return dataclasses.replace(known, **own | {"cameras": _read(known.cameras, meta, request)})
    return Conventions(
        **own,
        embodiment=meta.robot or UNKNOWN,
        cameras=tuple(_camera(meta, name) for name in request.of(meta)),
        state=_space(meta, request.state),
        action=_space(meta, request.action),
        control=UNKNOWN,
        fps=meta.fps,
    )


def _read(known: Sequence[Camera], meta: Meta, request: Request) -> tuple[Camera, ...]:
    """The cameras that the policy reads, in its order: the dataset's may be called `observation.images.NAME`."""
    by_name = {camera.name: camera for camera in known}
    return tuple(by_name.get(name) or by_name.get(short(name)) or _camera(meta, name) for name in request.of(meta))


def short(camera: str) -> str:
    """`observation.images.top` is the camera `top`."""
    return camera.removeprefix("observation.images.").removeprefix("observation.image.")


def _camera(meta: Meta, name: str) -> Camera:
    height, width, *_ = meta.features[name].shape
    return Camera(short(name), height, width)


def _space(meta: Meta, name: str) -> Space:
    feature = meta.features[name]
    size = feature.shape[0] if feature.shape else 1
    return Space(feature.names if len(feature.names) == size else tuple(f"{name}.{n}" for n in range(size)))
