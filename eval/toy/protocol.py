"""The toy's suite and conventions."""

from __future__ import annotations

from engine.policy.conventions import Camera, Conventions, Gripper, Space
from eval.presets import Preset

SUITES = {"toy_reach": 3}
INITIAL_STATES = 50
EXPERT = "toy_expert"
DEMONSTRATION = None  # there is no adapter to check
PRESETS = {
    "openpi": Preset("none", {"image": "top"}, {"toy_reach": 40}, trials=10, replan=4, settle=0, resolution=32),
}


def conventions(chosen: Preset, resolution: int | None = None) -> Conventions:
    """A plane: the state is the point and the goal, the action a step (1 is 0.1) and a gripper that does nothing."""
    size = resolution or chosen.resolution
    return Conventions(
        family="toy",
        embodiment="toy_point",
        cameras=tuple(Camera(name, size, size) for name in chosen.cameras),
        state=Space(("x", "y", "goal_x", "goal_y")),
        action=Space(("dx", "dy", "gripper"), gripper=Gripper()),
        fps=10.0,
    )
