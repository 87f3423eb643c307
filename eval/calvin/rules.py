"""CALVIN's tasks as rules over a symbolic scene: when each makes sense, and what it leaves behind.

A scene holds `led` and `lightbulb` (0, 1), `slider` (left, right), `drawer` (open, closed), a place for each block
(table, slider_left, slider_right, drawer, grasped, stacked_top, stacked_bottom) and `grasped` (0, 1).
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

Scene = dict[str, Any]
Rule = tuple[Scene, Scene]  # what must hold (a tuple: one of these), and what holds afterwards

BLOCKS = ("red_block", "blue_block", "pink_block")
SHELVES = ("slider_right", "slider_left")


def _turning() -> dict[str, list[Rule]]:
    """Turning and pushing leave a block where it is, as far as the scene can tell."""
    on_table = {block: [({block: "table", "grasped": 0}, {block: "table"})] for block in BLOCKS}
    return {
        f"{verb}_{block}_{side}": on_table[block]
        for verb in ("rotate", "push")
        for block in BLOCKS
        for side in ("right", "left")
    }


def _lifting() -> dict[str, list[Rule]]:
    """A block behind the slider's door can be had only when the door is on the other side."""
    rules: dict[str, list[Rule]] = {}
    for block in BLOCKS:
        held = {block: "grasped", "grasped": 1}
        behind = [("slider_left", "right"), ("slider_right", "left")]
        rules[f"lift_{block}_table"] = [({block: "table", "grasped": 0}, held)]
        rules[f"lift_{block}_slider"] = [({block: at, "slider": door, "grasped": 0}, held) for at, door in behind]
        rules[f"lift_{block}_drawer"] = [({block: "drawer", "drawer": "open", "grasped": 0}, held)]
    return rules


def _placing() -> dict[str, list[Rule]]:
    def holding(block: str, **more: Any) -> Scene:
        return {block: "grasped", **more, "grasped": 1}

    pairs = list(permutations(BLOCKS, 2))
    return {
        "place_in_slider": [
            (holding(block, slider=door), {block: f"slider_{door}", "grasped": 0})
            for block in BLOCKS
            for door in ("right", "left")
        ],
        "place_in_drawer": [(holding(block, drawer="open"), {block: "drawer", "grasped": 0}) for block in BLOCKS],
        "stack_block": [
            (holding(top, **{under: "table"}), {top: "stacked_top", under: "stacked_bottom", "grasped": 0})
            for top, under in pairs
        ],
        "unstack_block": [
            ({top: "stacked_top", under: "stacked_bottom", "grasped": 0}, {top: "table", under: "table"})
            for top, under in pairs
        ],
    }


def _switching() -> dict[str, list[Rule]]:
    return {
        f"turn_{word}_{light}": [({light: 1 - value, "grasped": 0}, {light: value})]
        for light in ("lightbulb", "led")
        for word, value in (("on", 1), ("off", 0))
    }


def _moving(thing: str, name: str, before: str, after: str) -> dict[str, list[Rule]]:
    return {name: [({thing: before, "grasped": 0}, {thing: after})]}


def _into_drawer() -> list[Rule]:
    """The one block on the table is pushed; the others must not lie in the way."""
    return [
        (
            {block: "table", **{other: SHELVES for other in BLOCKS if other != block}, "drawer": "open", "grasped": 0},
            {block: "drawer", "grasped": 0},
        )
        for block in BLOCKS
    ]


# The order is the official one: sequences are drawn by number.
RULES: dict[str, list[Rule]] = {
    **_turning(),
    **_moving("slider", "move_slider_left", "right", "left"),
    **_moving("slider", "move_slider_right", "left", "right"),
    **_moving("drawer", "open_drawer", "closed", "open"),
    **_moving("drawer", "close_drawer", "open", "closed"),
    **_lifting(),
    **_placing(),
    **_switching(),
    "push_into_drawer": _into_drawer(),
}


def kind(task: str) -> str:
    """A sequence holds at most one task of a kind."""
    if task.startswith(("rotate", "push")) and task != "push_into_drawer":
        return "block"
    if task.startswith("lift"):
        return f"lift_{task.rsplit('_', 1)[1]}"
    if task.startswith("place"):
        return "place"
    if task.startswith("turn"):
        return "light"
    return {"move_slider_left": "slider", "move_slider_right": "slider"}.get(task, task.replace("close", "open"))


def follows(scene: Scene, task: str) -> Scene | None:
    """The scene after a task; None unless exactly one of its rules applies."""
    found = [after for needed, after in RULES[task] if all(_holds(scene[key], want) for key, want in needed.items())]
    return scene | found[0] if len(found) == 1 else None


def _holds(value: Any, want: Any) -> bool:
    return value in want if isinstance(want, tuple) else value == want
