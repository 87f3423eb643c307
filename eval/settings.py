"""What `zoo eval` and `zoo serve` take, and how words become settings."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Optional, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.errors import UserError
from engine.suggest import did_you_mean, expected_type
from eval.server import ServerSettings

T = TypeVar("T")


@dataclass
class EvalSettings:
    """An evaluation."""

    benchmark: str = "libero"  # libero | toy (a point on a plane, which needs no simulator)
    suite: Optional[str] = None  # several: suite=a,b
    preset: str = "openpi"  # whose protocol: trials, horizons, replan interval, seed, cameras
    policy: Optional[str] = None  # one without weights, served here: zero | libero_expert
    cameras: bool = False  # such a policy looks at images too, which videos and the check need
    server: Optional[str] = None  # the address of a policy server instead
    token: Optional[str] = None  # of that server
    tasks: Optional[list[int]] = None  # None: all of the suite
    trials: Optional[int] = None  # episodes of a task; None: the preset's
    horizon: Optional[int] = None  # actions of an episode; None: the preset's
    replan: Optional[int] = None  # actions before the next inference; None: the policy's own
    seed: Optional[int] = None  # None: the preset's
    resolution: Optional[int] = None  # of images; None: the preset's
    multisampling: bool = False  # smooth edges, at twice the time
    convert: bool = False  # convert what has an exact conversion, instead of refusing it
    check: bool = True  # replay a demonstration before the episodes
    record: str = "failures"  # videos: failures | all | none
    workers: int = 2  # simulators at a time
    shard: str = "0/1"  # of several machines' shares, which one this is: 1/4
    retries: int = 2  # repetitions of an episode whose simulator crashed or stalled
    stall_s: float = 300.0  # without a sign of life, a simulator is restarted
    gl: Optional[str] = None  # egl | osmesa; None: MUJOCO_GL, else egl
    python: Optional[str] = None  # of the simulator's environment; None: the one of `zoo eval-env`
    output: Optional[str] = None  # folder; one that is there is gone on with. None: outputs/eval/<time>


@dataclass
class ServeSettings(ServerSettings):
    """A server of a policy without weights."""

    policy: Optional[str] = None  # zero | libero_expert
    benchmark: str = "libero"  # whose conventions it speaks
    preset: str = "openpi"
    cameras: bool = False


def read(kind: type[T], words: list[str]) -> T:
    """Settings from `key=value` words. UserError, a line for each mistake."""
    config, problems = OmegaConf.structured(kind), []
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(f"'{word}' is no setting; write key=value")
        elif key not in known:
            problems.append(f"{key}: there is no such setting{did_you_mean(key, known)}")
        else:
            try:
                setattr(config, key, _value(kind, key, text))
            except (OmegaConfBaseException, ValueError):
                problems.append(f"{key}={text}: it must be {expected_type(config._get_node(key))}")
    if problems:
        raise UserError("\n".join(problems))
    return OmegaConf.to_object(config)  # type: ignore[return-value]


def _value(kind: type[Any], key: str, text: str) -> Any:
    annotation = str(next(f.type for f in fields(kind) if f.name == key))
    if text in ("null", "none") and "Optional" in annotation:
        return None
    if "list" in annotation:
        return [int(part) for part in text.strip("[]").split(",")]
    return text


CHOICES = {"record": ("failures", "all", "none"), "gl": ("egl", "osmesa")}
AT_LEAST = {"trials": 1, "horizon": 1, "replan": 1, "resolution": 16, "workers": 1, "retries": 0, "seed": 0}


def check_eval(settings: EvalSettings) -> None:
    """UserError, a line for each value that cannot be."""
    problems = []
    for key, choices in CHOICES.items():
        value = getattr(settings, key)
        if value is not None and value not in choices:
            problems.append(f"{key}={value}: the choices are {', '.join(choices)}{did_you_mean(value, choices)}")
    for key, least in AT_LEAST.items():
        value = getattr(settings, key)
        if value is not None and value < least:
            problems.append(f"{key}={value}: it must be at least {least}")
    if not settings.stall_s > 0:
        problems.append(f"stall_s={settings.stall_s}: it must be greater than 0")
    if settings.suite is None:
        problems.append("suite is missing; for example suite=libero_spatial")
    if (settings.policy is None) == (settings.server is None):
        problems.append("name either policy=zero (or libero_expert), or server=ws://HOST:PORT")
    try:
        shard_of(settings.shard)
    except UserError as error:
        problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))


def shard_of(text: str) -> tuple[int, int]:
    """A shard and how many there are, from `1/4`."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise UserError(f"shard={text}: write NUMBER/COUNT, with numbers from 0, such as 0/2 and 1/2")
    return int(number), int(count)
