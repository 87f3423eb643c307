"""CALVIN's official sequences: which initial scenes, which five tasks, in which order, and where everything lies.

The sequences are drawn by trying, which takes minutes for a thousand; `sequences.txt` keeps them, and a test draws
them again. The numbers of the initial state are those of the public evaluation protocol.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np

from eval.calvin.rules import BLOCKS, RULES, Scene, follows, kind

LENGTH = 5
OFFICIAL = 1000
FILE = Path(__file__).parent / "sequences.txt"
NAMES = tuple(RULES)
VALUES = {
    "led": (0, 1),
    "lightbulb": (0, 1),
    "slider": ("right", "left"),
    "drawer": ("closed", "open"),
    **dict.fromkeys(BLOCKS, ("table", "slider_right", "slider_left")),
    "grasped": (0,),
}
FNV_PRIME = 0x01000193

Sequence = tuple[Scene, tuple[str, ...]]

# Poses of the robot (x, y, z, Euler angles, gripper width, seven joints, gripper command) and of blocks, in metres.
ROBOT = (
    *(0.02586889, -0.2313129, 0.5712808, 3.09045411, -0.02908596, 1.50013585, 0.07999963),
    *(-1.21779124, 1.03987629, 2.11978254, -2.34205014, -0.87015899, 1.64119093, 0.55344928, 1.0),
)
SHELF = {
    "slider_left": (-2.40851662e-01, 9.24044687e-02, 4.60990009e-01),
    "slider_right": (7.03416330e-02, 9.24044687e-02, 4.60990009e-01),
}
TABLE = ((5.00000896e-02, -1.20000177e-01, 4.59990009e-01), (2.29995412e-01, -1.19995140e-01, 4.59990010e-01))
TURN = (np.pi / 2 - np.pi / 8, np.pi / 2 + np.pi / 8)  # range of a block's rotation about z


def initial_scenes() -> list[Scene]:
    """The 192 scenes: one or two blocks on the table, no two in one place of the slider."""
    scenes = []
    for values in product(*VALUES.values()):
        if values.count("table") in (1, 2) and values.count("slider_right") < 2 and values.count("slider_left") < 2:
            scenes.append(dict(zip(VALUES, values, strict=True)))
    return scenes


def draw(scene: Scene, count: int, seed: int) -> list[tuple[str, ...]]:
    """`count` sequences of five tasks that can follow on a scene, all of different kinds."""
    random = np.random.RandomState(seed)  # the official draws are the old generator's
    kinds, found = [kind(name) for name in NAMES], []
    first = {number for number, name in enumerate(NAMES) if follows(scene, name)}
    while len(found) < count:
        chosen = random.permutation(len(NAMES))[:LENGTH].tolist()
        # Most draws fail here already, which is cheaper than to look at all five.
        if chosen[0] not in first or len({kinds[number] for number in chosen}) < LENGTH:
            continue
        if _possible(scene, chosen):
            found.append(tuple(NAMES[number] for number in chosen))
    return found


def _possible(scene: Scene | None, chosen: list[int]) -> bool:
    for number in chosen:
        scene = follows(scene, NAMES[number]) if scene else None
    return scene is not None


def draw_all(count: int = OFFICIAL) -> list[Sequence]:
    """The whole set: an even share for each scene, shuffled."""
    scenes = initial_scenes()
    shares = [len(part) for part in np.array_split(range(count), len(scenes))]
    drawn = map(draw, scenes, shares, range(len(scenes)))
    return in_order([(scene, tasks) for scene, found in zip(scenes, drawn, strict=True) for tasks in found])


def in_order(sequences: list[Sequence]) -> list[Sequence]:
    """The official order of sequences that come scene by scene."""
    sequences = list(sequences)
    np.random.RandomState(0).shuffle(sequences)  # type: ignore[arg-type]
    return sequences


def encode(sequences: list[Sequence]) -> str:
    """A line for each: the number of its scene, and the five tasks' numbers."""
    scenes = initial_scenes()
    lines = [f"{scenes.index(scene)} {' '.join(str(NAMES.index(t)) for t in tasks)}" for scene, tasks in sequences]
    return "\n".join(lines) + "\n"


def official(count: int = OFFICIAL) -> list[Sequence]:
    """The first `count` of the thousand, in the official order."""
    scenes, sequences = initial_scenes(), []
    for line in FILE.read_text().splitlines()[:count]:
        scene, *tasks = map(int, line.split())
        sequences.append((dict(scenes[scene]), tuple(NAMES[number] for number in tasks)))
    return sequences


def fnv1(text: str) -> int:
    """FNV-1 of 32 bits (Fowler, Noll and Vo) that begins at 0, as pyhash does."""
    value = 0
    for byte in text.encode():
        value = value * FNV_PRIME % 2**32 ^ byte
    return value


def initial_state(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Robot [15] and scene [24] observations that a simulator is reset to; the scene's values seed what is drawn.

    The scene: slider, drawer, button, switch, lightbulb, led, then position and Euler angles of each block.
    """
    random = np.random.RandomState(fnv1(str(scene.values())))
    table = [np.array(place) for place in TABLE]
    random.shuffle(table)
    state = np.zeros(24)
    state[0] = 0.28 * (scene["slider"] == "left")
    state[1] = 0.22 * (scene["drawer"] == "open")
    state[3] = 0.088 * (scene["lightbulb"] == 1)
    state[4], state[5] = scene["lightbulb"], scene["led"]
    on_table = [block for block in BLOCKS if scene[block] == "table"]
    for number, block in enumerate(BLOCKS):
        at = 6 + 6 * number
        # Two places for at most two blocks: the red one takes the first, the pink one the second.
        second = block == "pink_block" or (block == "blue_block" and on_table[0] == "red_block")
        state[at : at + 3] = table[second] if block in on_table else SHELF[scene[block]]
        state[at + 5] = random.uniform(*TURN)
    return np.array(ROBOT), state
