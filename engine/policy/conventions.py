"""The conventions of a policy, or of a benchmark: data that can be compared, not habits. Free of torch.

Most results of 0% in this field are a flipped image, a gripper of the other sign, or Euler angles read as an axis and
an angle. Whoever produces observations or takes actions says here what they mean.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from engine.errors import UserError

VERSION = 1
FILE = "conventions.json"

CHOICES: dict[str, tuple[str, ...]] = {
    "flip": ("none", "vertical", "horizontal", "rotate180"),
    "layout": ("HWC", "CHW"),
    "channels": ("RGB", "BGR"),
    "rotation": ("none", "axis_angle", "quat_xyzw", "quat_wxyz", "euler_xyz", "rot6d_rows", "rot6d_columns", "joints"),
    "control": ("absolute", "delta", "delta_of_target", "unknown"),
    "frame": ("base", "world", "gripper"),
}


@dataclass(frozen=True)
class Camera:
    """An image as the policy takes it or the benchmark gives it."""

    name: str
    height: int
    width: int
    flip: str = "none"  # against the upright image: what an upright image has been through
    layout: str = "HWC"
    channels: str = "RGB"


@dataclass(frozen=True)
class Gripper:
    """The command's numbers, or the state's, for an open and for a closed gripper."""

    open: float = -1.0
    close: float = 1.0
    binary: bool = True  # nothing between the two


@dataclass(frozen=True)
class Space:
    """A vector of numbers: what each is called, and how to read them."""

    names: tuple[str, ...] = ()
    rotation: str = "none"  # of the orientation within it
    frame: str = "base"
    gripper: Optional[Gripper] = None

    @property
    def size(self) -> int:
        """Numbers of the vector."""
        return len(self.names)


@dataclass(frozen=True)
class Conventions:
    """Everything that two sides must agree on before the first action."""

    family: str
    embodiment: str  # libero_panda, calvin_panda, widowx, google_robot, ...
    cameras: tuple[Camera, ...] = ()
    state: Space = field(default_factory=Space)
    action: Space = field(default_factory=Space)
    control: str = "delta"  # of the end effector or the joints; the gripper is always absolute
    fps: float = 20.0
    horizon: int = 1  # actions of one inference
    replan: int = 1  # of which so many are carried out before the next
    version: int = VERSION

    def save(self, folder: Path) -> None:
        """Write `conventions.json`."""
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


def load(folder: Path) -> Conventions:
    """The conventions of a policy directory. UserError if they are missing, of another version or not understood."""
    path = folder / FILE
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder}: there is no {FILE}; a policy directory that job=train wrote has one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    return parse(values, str(path))


def parse(values: Any, where: str) -> Conventions:
    """Conventions from decoded JSON; `where` names their origin in a UserError."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: conventions must be an object")
    if values.get("version") != VERSION:
        raise UserError(
            f"{where}: version {values.get('version')}; this program reads conventions of version {VERSION}"
        )
    try:
        made = Conventions(
            **values
            | {
                "cameras": tuple(Camera(**camera) for camera in values.get("cameras", ())),
                "state": _space(values.get("state", {})),
                "action": _space(values.get("action", {})),
            }
        )
    except TypeError as error:
        raise UserError(f"{where}: {error}") from None
    for problem in problems(made):
        raise UserError(f"{where}: {problem}")
    return made


def _space(values: dict[str, Any]) -> Space:
    gripper = values.get("gripper")
    return Space(
        **values | {"names": tuple(values.get("names", ())), "gripper": Gripper(**gripper) if gripper else None}
    )


def problems(conventions: Conventions) -> Iterator[str]:
    """What makes no sense by itself, one a line."""
    for camera in conventions.cameras:
        for key in ("flip", "layout", "channels"):
            yield from _choice(f"camera {camera.name}: {key}", getattr(camera, key), CHOICES[key])
    for name, space in (("state", conventions.state), ("action", conventions.action)):
        yield from _choice(f"{name}.rotation", space.rotation, CHOICES["rotation"])
        yield from _choice(f"{name}.frame", space.frame, CHOICES["frame"])
    yield from _choice("control", conventions.control, CHOICES["control"])
    if not 1 <= conventions.replan <= conventions.horizon:
        yield f"replan={conventions.replan}: it must be from 1 to horizon={conventions.horizon}"
    if not conventions.fps > 0:
        yield f"fps={conventions.fps}: it must be greater than 0"


def _choice(name: str, value: str, known: tuple[str, ...]) -> Iterator[str]:
    if value not in known:
        from engine.suggest import did_you_mean  # not in a simulator's environment, which lacks its packages

        yield f"{name}={value}: it is one of {', '.join(known)}{did_you_mean(value, known)}"


def differences(policy: Conventions, benchmark: Conventions) -> Iterator[str]:
    """Where a policy and a benchmark do not agree and no conversion is known, one a line.

    Sizes of images, layouts and rotations are converted by `eval`; what is listed here is what nothing could repair
    without guessing: other cameras, sizes of vectors, control, gripper, frame, rate.
    """
    mine, theirs = {c.name: c for c in policy.cameras}, {c.name: c for c in benchmark.cameras}
    for name in sorted(mine.keys() - theirs.keys()):
        yield f"the policy sees the camera '{name}', which the benchmark does not have ({', '.join(sorted(theirs))})"
    for kind in ("state", "action"):
        a, b = getattr(policy, kind), getattr(benchmark, kind)
        if a.names and b.names and a.names != b.names:
            yield f"{kind}: the policy has {_named(a)}, the benchmark {_named(b)}"
        if a.frame != b.frame:
            yield f"{kind}: the policy speaks of the frame '{a.frame}', the benchmark of '{b.frame}'"
    if policy.control != benchmark.control:
        yield f"control: the policy gives {policy.control} actions, the benchmark takes {benchmark.control} ones"
    if policy.embodiment != benchmark.embodiment:
        yield f"embodiment: the policy is for '{policy.embodiment}', the benchmark is '{benchmark.embodiment}'"


def _named(space: Space) -> str:
    shown = ", ".join(space.names[:8]) + (", ..." if space.size > 8 else "")
    return f"{space.size} numbers ({shown})"
