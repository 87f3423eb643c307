"""How LIBERO is measured: suites, and the protocols of those who publish numbers on it. Free of the simulator."""

from __future__ import annotations

from pathlib import Path

from engine.policy.conventions import Camera, Conventions, Gripper, Space
from eval.presets import Preset

SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
INITIAL_STATES = 50  # of every task
EXPERT = "libero_expert"  # who records demonstrations
DEMONSTRATION = Path(__file__).parent / "demonstration.json"  # of the scripted expert
FPS = 20.0
AGENT, WRIST = "agentview", "robot0_eye_in_hand"
ACTION = ("dx", "dy", "dz", "drx", "dry", "drz", "gripper")
STATE = ("x", "y", "z", "rx", "ry", "rz", "finger_left", "finger_right")
TURNED = "horizontal"  # the renderer's upside-down image turned by 180 degrees: upright, but mirrored


def _horizons(spatial: int, objects: int, goal: int, ten: int, ninety: int) -> dict[str, int]:
    return dict(zip(SUITES, (spatial, objects, goal, ten, ninety), strict=True))


OPENPI_CAMERAS = {"image": AGENT, "wrist_image": WRIST}
PRESETS = {
    "openpi": Preset(
        "openpi, examples/libero", OPENPI_CAMERAS, _horizons(220, 280, 300, 520, 400), trials=50, replan=5, flip=TURNED
    ),
    "lerobot": Preset(
        "lerobot 0.6, lerobot-eval",
        {"image": AGENT, "image2": WRIST},
        _horizons(280, 280, 300, 520, 400),
        trials=10,
        replan=10,
        seed=1000,
        flip=TURNED,
    ),
    "groot": Preset(
        "NVIDIA Isaac-GR00T, LIBERO",
        OPENPI_CAMERAS,
        _horizons(720, 720, 720, 720, 720),
        trials=20,
        replan=8,
        flip=TURNED,
    ),
}


def conventions(chosen: Preset, resolution: int | None = None) -> Conventions:
    """What LIBERO gives and takes under a protocol.

    The action is OSC_POSE's of robosuite 1.4, scaled to [-1, 1] (1 is 0.05 m and 0.5 rad), against the arm's present
    pose in its base frame. The state is the hand's position, its rotation as axis and angle, and both fingers.
    """
    size = resolution or chosen.resolution
    return Conventions(
        family="libero",
        embodiment="libero_panda",
        cameras=tuple(Camera(name, size, size, flip=chosen.flip) for name in chosen.cameras),
        state=Space(STATE, rotation="axis_angle"),
        action=Space(ACTION, rotation="axis_angle", gripper=Gripper(open=-1.0, close=1.0, binary=False)),
        control="delta",
        fps=FPS,
    )
