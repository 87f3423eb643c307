"""Which parameters decay, and which of them learn otherwise than the rest. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Optional, TypeVar

from engine.errors import UserError
from engine.family import Family, load_dotted
from engine.schema import Run
from engine.suggest import did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Parameters by published name, and what is theirs: `optim.groups`."""

    path: str = "*"  # a pattern: * stands for anything
    lr_scale: float = 1.0  # times optim.lr
    weight_decay: Optional[float] = None  # of its matrices; None: optim.weight_decay
    frozen: bool = False  # not trained


REST = Group()


def groups_of(spelled: Optional[Sequence[Any]]) -> list[Group]:
    """The groups that the settings spell. Raises UserError, one line for each that is none."""
    found, problems = [], []
    for number, one in enumerate(spelled or ()):
        try:
            found.append(_group(one))
        except ValueError as error:
            problems.append(f"optim.groups[{number}]: {error}")
    if problems:
        raise UserError("\n".join(problems))
    return found


def _group(one: Any) -> Group:
    known = [field.name for field in fields(Group)]
    if not isinstance(one, Mapping) or not isinstance(one.get("path"), str):
        raise ValueError("it is an object with a path, such as {path: '*vision_tower*', lr_scale: 0.1}")
    if unknown := [key for key in one if key not in known]:
        raise ValueError(f"{unknown[0]} is no key{did_you_mean(unknown[0], known)}; it has {', '.join(known)}")
    group = Group(**one)
    for key in ("lr_scale", "weight_decay"):
        value = getattr(group, key)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9
        ):
            raise ValueError(f"{key}={value}: must be a number of 0 or more")
    if not isinstance(group.frozen, bool):
        raise ValueError(f"frozen={group.frozen}: must be true or false")
    return group


def group_of(name: str, groups: Sequence[Group]) -> Group:
    """The first group whose path fits a published name."""
    return next((group for group in groups if fnmatchcase(name, group.path)), REST)


def check(run: Run, family: Family) -> None:
    """UserError for groups of a run that are none, and for those that are the first to fit no tensor at all."""
    if not run.optim.groups or run.job.name != "train":
        return
    groups = groups_of(run.optim.groups)
    published = load_dotted(family.weights)(run.model).published
    used = {group_of(name, groups).path for name in published}
    lines = [
        f"optim.groups: path {group.path} fits no tensor that no group before it fits; names are such as "
        f"{next(iter(published))}"
        for group in groups
        if group.path not in used
    ]
    if lines:
        raise UserError("\n".join(lines))


def decays(shape: tuple[int, ...]) -> bool:
    """Matrices and embeddings decay; norms and biases, whose tensors have one dimension, do not.

    `shape` is the whole tensor's: a shard's own shape may differ.
    """
    return len(shape) >= 2


def divided(
    items: Sequence[tuple[tuple[int, ...], T]], groups: Sequence[Group], weight_decay: float
) -> list[tuple[list[T], float, float]]:
    """(items, weight decay, scale of the rate) of what is updated alike, of (whole shape, item) pairs and the group of
    each, in the order of their first items.
    """
    found: dict[tuple[float, float], list[T]] = {}
    for (shape, item), group in zip(items, groups or [REST] * len(items), strict=True):
        own = weight_decay if group.weight_decay is None else group.weight_decay
        found.setdefault((own if decays(shape) else 0.0, group.lr_scale), []).append(item)
    return [(members, decay, scale) for (decay, scale), members in found.items()]
