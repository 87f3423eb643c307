"""The typed schema of serving and of evaluation, as `engine.schema` has that of training. Free of torch and Hydra."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from omegaconf import MISSING


@dataclass
class ServerSettings:
    """Where and how a policy is served."""

    host: str = "127.0.0.1"  # other addresses need a token
    port: int = 8000  # 0: any that is free
    token: Optional[str] = None  # clients send it as `Authorization: Api-Key TOKEN`, as openpi's do
    max_clients: int = 128  # connections at a time
    max_message_mb: float = 64.0  # a larger message ends its connection
    max_batch: int = 16  # observations of one forward pass
    max_wait_ms: float = 3.0  # that the first observation of a batch waits for others
    seed: int = 7  # of the sampling, for clients that send none


@dataclass
class Episodes:
    """Which episodes of a benchmark are played, and how."""

    suite: Optional[str] = None  # such as libero_object or toy_reach
    preset: str = "openpi"  # whose protocol: trials, horizons, replan interval, seed, cameras
    tasks: Optional[list[int]] = None  # None: all of the suite
    trials: Optional[int] = None  # episodes of a task; None: the preset's
    horizon: Optional[int] = None  # actions of an episode; None: the preset's
    replan: Optional[int] = None  # actions before the next inference; None: the policy's own
    seed: Optional[int] = None  # None: the preset's
    batch: int = 1  # observations of one forward pass of a trained policy, filled up: results depend on nothing else
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
    output: Optional[str] = None  # folder of the results, which the same command goes on with; None: a new one


@dataclass
class Evaluation(Episodes):
    """The group `eval` of a run: job=eval."""

    name: str = MISSING  # the benchmark: libero | toy


@dataclass
class ServeJob(ServerSettings):
    name: str = "serve"
    fill: bool = False  # fill every forward pass up to max_batch, so that answers never depend on who asks with whom


@dataclass
class EvalJob:
    name: str = "eval"
