"""What `zoo demos` and `zoo demos-replay` take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Optional

from engine.errors import UserError
from engine.suggest import did_you_mean
from eval import presets

PACKAGES = ("av", "pyarrow", "pandas")
BACKENDS = ("egl", "osmesa")


@dataclass
class Simulators:
    """Where simulators run."""

    workers: int = 2  # simulators at a time
    retries: int = 2  # repetitions of an episode whose simulator crashed or stalled
    stall_s: float = 300.0  # without a sign of life, a simulator is restarted
    gl: Optional[str] = None  # egl | osmesa; None: MUJOCO_GL, else egl
    python: Optional[str] = None  # of the simulator's environment; None: the one of `zoo eval-env`


@dataclass
class DemoSettings(Simulators):
    """A dataset of demonstrations."""

    benchmark: str = "libero"  # libero | toy (a point on a plane, which needs no simulator)
    suite: Optional[str] = None  # such as libero_object or toy_reach
    preset: str = "openpi"  # whose cameras, image flips and settling steps
    tasks: Optional[list[int]] = None  # None: all of the suite
    episodes: int = 20  # successful ones of each task, from the last initial state backwards
    horizon: Optional[int] = None  # actions after which an episode has failed; None: the preset's
    seed: Optional[int] = None  # of the simulator; None: the preset's
    resolution: Optional[int] = None  # of images, an even number; None: the preset's
    multisampling: bool = False  # smooth edges, at twice the time
    output: Optional[str] = None  # folder of the dataset; one that was begun is gone on with


@dataclass
class ReplaySettings(Simulators):
    """Recorded actions carried out again."""

    episodes: Optional[int] = None  # the first of the dataset; None: all


def check_packages() -> None:
    """UserError for what writes Parquet and videos, if it is not installed."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f"zoo demos needs {', '.join(missing)}, not installed here: uv sync --extra embodied")


def check(settings: DemoSettings) -> None:
    """UserError, a line for each value that cannot be."""
    if problems := [*_simulators(settings), *_dataset(settings)]:
        raise UserError("\n".join(problems))


def check_replay(settings: ReplaySettings) -> None:
    """UserError, a line for each value that cannot be."""
    problems = [*_simulators(settings)]
    if settings.episodes is not None and settings.episodes < 1:
        problems.append(f"episodes={settings.episodes}: it must be at least 1")
    if problems:
        raise UserError("\n".join(problems))


def _simulators(settings: Simulators) -> Iterator[str]:
    for key, least in (("workers", 1), ("retries", 0)):
        if getattr(settings, key) < least:
            yield f"{key}={getattr(settings, key)}: it must be at least {least}"
    if not settings.stall_s > 0:
        yield f"stall_s={settings.stall_s}: it must be greater than 0"
    if settings.gl is not None and settings.gl not in BACKENDS:
        yield f"gl={settings.gl}: the choices are {', '.join(BACKENDS)}{did_you_mean(settings.gl, BACKENDS)}"


def _dataset(settings: DemoSettings) -> Iterator[str]:
    if settings.output is None:
        yield "output is missing; name the folder of the dataset with output=DIR"
    if settings.resolution is not None and (settings.resolution < 16 or settings.resolution % 2):
        yield f"resolution={settings.resolution}: it must be even, which the codec wants, and at least 16"
    for key in ("horizon", "seed"):
        value: Any = getattr(settings, key)
        if value is not None and value < (key == "horizon"):
            yield f"{key}={value}: it must be at least {int(key == 'horizon')}"
    try:
        protocol = presets.benchmark(settings.benchmark)
        presets.chosen(settings.benchmark, settings.preset)
        if settings.suite is None:
            yield f"suite is missing; {settings.benchmark} has {', '.join(protocol.SUITES)}"
            return
        count = presets.tasks_of(settings.benchmark, settings.suite)
    except UserError as error:
        yield str(error)
        return
    if wrong := [task for task in settings.tasks or () if not 0 <= task < count]:
        yield f"tasks={wrong[0]}: {settings.suite} has the tasks 0 to {count - 1}"
    if not 1 <= settings.episodes <= protocol.INITIAL_STATES:
        most = protocol.INITIAL_STATES
        yield f"episodes={settings.episodes}: it must be from 1 to {most}, the initial states of a task"
