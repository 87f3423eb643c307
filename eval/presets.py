"""What a protocol of a benchmark fixes, and what a worker is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType

from engine.errors import UserError

MODULES = {"libero": "eval.libero.protocol", "toy": "eval.toy.protocol"}


@dataclass(frozen=True)
class Preset:
    """The choices of one group; `horizons` are actions of an episode, after the settling ones."""

    source: str
    cameras: dict[str, str]  # a policy's name for each camera of the simulator
    horizons: dict[str, int]  # of each suite
    trials: int  # episodes of a task
    replan: int
    seed: int = 7
    settle: int = 10
    flip: str = "none"  # what images have been through, against upright ones
    resolution: int = 256


@dataclass
class Setup:
    """What a worker needs to know of its simulator."""

    suite: str
    cameras: dict[str, str] = field(default_factory=dict)  # those that are looked at
    resolution: int = 256
    settle: int = 10
    flip: str = "none"
    multisampling: bool = False


def benchmark(name: str) -> ModuleType:
    """A benchmark's protocols: PRESETS, SUITES (tasks of each), INITIAL_STATES, DEMONSTRATION, conventions()."""
    if name not in MODULES:
        from engine.suggest import did_you_mean

        raise UserError(f"benchmark={name}: there are {', '.join(MODULES)}{did_you_mean(name, MODULES)}")
    return import_module(MODULES[name])


def chosen(name: str, preset: str) -> Preset:
    """A protocol of a benchmark; UserError for one that is not there."""
    from engine.suggest import did_you_mean

    presets: dict[str, Preset] = benchmark(name).PRESETS
    if preset not in presets:
        raise UserError(f"preset={preset}: those of {name} are {', '.join(presets)}{did_you_mean(preset, presets)}")
    return presets[preset]


def tasks_of(name: str, suite: str) -> int:
    """How many tasks a suite has; UserError for one that is not there."""
    from engine.suggest import did_you_mean

    suites: dict[str, int] = benchmark(name).SUITES
    if suite not in suites:
        raise UserError(f"suite={suite}: {name} has {', '.join(suites)}{did_you_mean(suite, suites)}")
    return suites[suite]
