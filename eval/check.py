"""Before any episode: do the policy and the benchmark mean the same, and does the adapter do what it says?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Conventions, Gripper, differences
from engine.policy.convert import SIZES
from eval import protocol
from eval.episode import derive_seed
from eval.simulator import Observation, Simulator
from eval.translate import Translator


def check_conventions(policy: Conventions, benchmark: Conventions, convert: bool) -> None:
    """UserError, a line for each difference that makes an evaluation meaningless.

    With `convert` those that can be converted exactly from what both sides declare (flips, channels, layouts, grippers,
    rotations of one size of vector) are no reason to refuse.
    """
    problems = list(differences(policy, benchmark))
    if not convert:
        problems += [f"{line}; convert=true converts it" for line in convertible(policy, benchmark)]
    for kind in ("state", "action"):
        a, b = getattr(policy, kind).rotation, getattr(benchmark, kind).rotation
        if a != b and "none" not in (a, b) and not {a, b} <= SIZES.keys():
            problems.append(f"{kind}: a rotation given as {a} cannot be converted to {b}")
    if problems:
        raise UserError("\n".join(problems))


def convertible(policy: Conventions, benchmark: Conventions) -> Iterator[str]:
    """Differences that have an exact conversion, one a line."""
    theirs = {camera.name: camera for camera in benchmark.cameras}
    for mine in policy.cameras:
        if other := theirs.get(mine.name):
            if mine.flip != other.flip:
                yield (
                    f"camera {mine.name}: the policy knows images flipped '{mine.flip}', "
                    f"and the benchmark's protocol gives '{other.flip}'"
                )
            for key in ("layout", "channels"):
                if getattr(mine, key) != getattr(other, key):
                    yield (
                        f"camera {mine.name}: the policy takes {key} {getattr(mine, key)}, "
                        f"and the benchmark gives {getattr(other, key)}"
                    )
    for kind in ("state", "action"):
        a, b = getattr(policy, kind), getattr(benchmark, kind)
        if a.rotation != b.rotation:
            yield f"{kind}: the policy's rotation is {a.rotation}, and the benchmark's is {b.rotation}"
        if a.gripper and b.gripper and _ends(a.gripper) != _ends(b.gripper):
            yield (
                f"{kind}: the policy's gripper opens at {a.gripper.open:g} and closes at {a.gripper.close:g}, "
                f"and the benchmark's opens at {b.gripper.open:g} and closes at {b.gripper.close:g}"
            )


def _ends(gripper: Gripper) -> tuple[float, float]:
    return gripper.open, gripper.close


def replay(
    simulator: Simulator,
    policy: Conventions,
    benchmark: Conventions,
    message: dict[str, Any],
    alive: Callable[[int], None],
) -> dict[str, Any]:
    """A recorded demonstration, told in the policy's conventions and carried out through the adapter.

    `message` holds `task`, `episode`, `seed`, `actions` [T, D] of the benchmark and `image`, a file for what the policy
    sees at the start (None: nothing is drawn). Gives whether it succeeded, and after how many steps.
    """
    translator, image = Translator(policy, benchmark), message.get("image")
    look = bool(image and policy.cameras)
    seen = simulator.reset(message["task"], message["episode"], derive_seed(message["seed"], "simulator"), look)
    if look:
        _save_image(Path(str(image)), translator, seen)
    step = 0
    for step, action in enumerate(np.asarray(message["actions"], dtype=np.float64), 1):
        seen = simulator.step(translator.action(translator.inverse(action)), False)
        alive(step)
        if seen.success:
            break
    return {"success": bool(seen.success), "steps": step}


def _save_image(path: Path, translator: Translator, seen: Observation) -> None:
    """What the policy sees, all cameras side by side."""
    from PIL import Image

    message = translator.observation(seen, "", None)
    shown = []
    for camera in translator.policy.cameras:
        pixels = message[protocol.image_key(camera.name)]
        shown.append(np.moveaxis(pixels, 0, -1) if camera.layout == "CHW" else pixels)
    Image.fromarray(np.concatenate(shown, axis=1)).save(path)
