"""What `zoo eval` and `zoo serve` take, and how words become settings."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Optional, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.describe import descriptions
from engine.errors import UserError
from engine.judging import Episodes, ServerSettings
from engine.schema import Run
from engine.suggest import did_you_mean, expected_type
from eval import presets

T = TypeVar("T")


@dataclass
class EvalSettings(Episodes):
    """An evaluation."""

    benchmark: str = "libero"  # libero | toy (a point on a plane, which needs no simulator)
    policy: Optional[str] = None  # a policy directory, or one without weights: zero | libero_expert | toy_expert
    precision: str = "fp32"  # of a policy directory: fp32 | bf16
    cameras: bool = False  # a policy without weights looks at images too, which videos and the check need
    server: Optional[str] = None  # the address of a policy server instead
    token: Optional[str] = None  # of that server


@dataclass
class ServeSettings(ServerSettings):
    """A server of a policy."""

    policy: Optional[str] = None  # a policy directory, or one without weights: zero | libero_expert | toy_expert
    precision: str = "fp32"  # of a policy directory: fp32 | bf16
    fill: bool = False  # fill every forward pass up to max_batch, so that answers never depend on who asks with whom
    benchmark: str = "libero"  # whose conventions a policy without weights speaks
    preset: str = "openpi"
    cameras: bool = False


def described(about: str, usage: str, kind: type[Any]) -> str:
    """The help of a command: every setting with its default and what it means."""
    words = descriptions(kind)
    keys = [(f"{f.name}={'null' if f.default is None else f.default}", words.get(f.name, "")) for f in fields(kind)]
    lines = "\n".join(f"  {key:<24} {said}".rstrip() for key, said in keys)
    return f"{about}\n\nUsage: {usage}\n\nSettings and their defaults:\n{lines}"


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
AT_LEAST = {"trials": 1, "horizon": 1, "replan": 1, "batch": 1, "resolution": 16, "workers": 1, "retries": 0, "seed": 0}
PRECISIONS = ("fp32", "bf16")


def check_eval(settings: EvalSettings) -> None:
    """UserError, a line for each value that cannot be."""
    problems = [*episode_problems(settings), *precision_problems(settings.precision)]
    if (settings.policy is None) == (settings.server is None):
        problems.append("name either policy=DIR (or zero, libero_expert), or server=ws://HOST:PORT")
    if problems:
        raise UserError("\n".join(problems))


def precision_problems(name: str) -> Iterator[str]:
    """A line if a policy directory cannot be computed with in it."""
    if name not in PRECISIONS:
        yield f"precision={name}: the choices are {', '.join(PRECISIONS)}{did_you_mean(name, PRECISIONS)}"


def episode_problems(settings: Episodes, prefix: str = "") -> Iterator[str]:
    """What no evaluation can have, a line each; `prefix` is what stands before a setting's name."""
    for key, choices in CHOICES.items():
        value = getattr(settings, key)
        if value is not None and value not in choices:
            yield f"{prefix}{key}={value}: the choices are {', '.join(choices)}{did_you_mean(value, choices)}"
    for key, least in AT_LEAST.items():
        value = getattr(settings, key)
        if value is not None and value < least:
            yield f"{prefix}{key}={value}: it must be at least {least}"
    if not settings.stall_s > 0:
        yield f"{prefix}stall_s={settings.stall_s}: it must be greater than 0"
    if settings.suite is None:
        yield f"{prefix}suite is missing; for example {prefix}suite=libero_spatial"
    try:
        shard_of(settings.shard)
    except UserError as error:
        yield f"{prefix}{error}"


def serving_problems(settings: ServerSettings, prefix: str = "") -> Iterator[str]:
    """What cannot be served, or should not, a line each."""
    if not loopback(settings.host) and not settings.token:
        yield (
            f"{prefix}host={settings.host}: others could reach the policy there; set {prefix}token=SECRET, "
            f"or {prefix}host=127.0.0.1"
        )
    if not 0 <= settings.port <= 65535:
        yield f"{prefix}port={settings.port}: it must be from 0 to 65535"
    for key in ("max_clients", "max_batch", "max_message_mb"):
        if not getattr(settings, key) > 0:
            yield f"{prefix}{key}={getattr(settings, key)}: it must be greater than 0"
    if not 0 <= settings.max_wait_ms < 60_000:
        yield f"{prefix}max_wait_ms={settings.max_wait_ms}: it must be from 0 to 60000"


def loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def job_problems(run: Run) -> Iterator[str]:
    """What a run of job=eval or job=serve cannot have: the controller asks for it before anything starts."""
    if run.job.name == "serve":
        yield from serving_problems(run.job, "job.")
        return
    yield from episode_problems(run.eval, "eval.")
    try:
        presets.chosen(run.eval.name, run.eval.preset)
        if run.eval.suite is not None:
            presets.tasks_of(run.eval.name, run.eval.suite)
    except UserError as error:
        yield f"eval.{error}"


def shard_of(text: str) -> tuple[int, int]:
    """A shard and how many there are, from `1/4`."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise UserError(f"shard={text}: write NUMBER/COUNT, with numbers from 0, such as 0/2 and 1/2")
    return int(number), int(count)
