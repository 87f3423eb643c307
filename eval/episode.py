"""One episode: a simulator, a policy behind the protocol, and what came of the two."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

import numpy as np

from engine.errors import UserError
from engine.policy.conventions import Conventions, parse
from eval.client import Client
from eval.simulator import Observation, Simulator
from eval.translate import Translator

VIDEO_FPS = 5


@dataclass(frozen=True)
class Job:
    """Which episode, and how it is played."""

    task: int
    episode: int
    horizon: int
    replan: Optional[int] = None  # None: as the policy declares
    seed: int = 7
    video: Optional[str] = None  # where it is written, if it is
    record: str = "failures"  # failures | all | none

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from the others of a run."""
        return self.task, self.episode


def derive_seed(*parts: Any) -> int:
    """A seed of 31 bits, the same on every machine and in whatever order episodes are played."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def policy_conventions(client: Client, benchmark: Conventions) -> Conventions:
    """What a server declares; a server of openpi's declares nothing and is taken at the benchmark's word."""
    if not client.ours:
        return benchmark
    return parse(client.metadata.get("conventions"), f"the policy at {client.address}")


def play(
    simulator: Simulator,
    client: Client,
    policy: Conventions,
    benchmark: Conventions,
    job: Job,
    alive: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """The episode's line of results. `alive` hears of each step.

    An episode succeeds as soon as the benchmark says so at any step, and fails at its horizon.
    """
    started = time.perf_counter()
    translator, needs = Translator(policy, benchmark), client.metadata.get("needs", ())
    replan = job.replan or policy.replan
    sees, films = bool(policy.cameras), job.record != "none" and bool(policy.cameras)
    every = max(1, round(benchmark.fps / VIDEO_FPS))
    if films:
        _check_video()
    session, prompt = f"{job.task}/{job.episode}", simulator.instruction(job.task)
    seen = simulator.reset(job.task, job.episode, derive_seed(job.seed, "simulator"), sees)
    frames, latencies = [_frame(seen)] if films else [], []
    plan: deque[np.ndarray] = deque()
    carried_out = hashlib.sha256()
    step = 0
    while step < job.horizon and not seen.success:
        if not plan:
            message = translator.observation(seen, prompt, simulator.privileged() if "privileged" in needs else None)
            seed = derive_seed(job.seed, job.task, job.episode, step)
            asked = time.perf_counter()
            actions = client.actions(message, len(policy.action.names), seed, session, step)
            latencies.append(time.perf_counter() - asked)
            plan.extend(actions[:replan])
        look = sees and len(plan) == 1
        film = films and step % every == every - 1
        action = translator.action(plan.popleft())
        carried_out.update(np.asarray(action, np.float64).tobytes())
        seen = simulator.step(action, look or film)
        if film:
            frames.append(_frame(seen))
        step += 1
        alive(step)
    line: dict[str, Any] = {
        "task": job.task,
        "episode": job.episode,
        "prompt": prompt,
        "success": bool(seen.success),
        "steps": step,
        "reason": None if seen.success else "horizon",
        "inferences": len(latencies),
        "actions": carried_out.hexdigest()[:16],  # the same on the same machine, bit for bit
        "latency_ms": round(1e3 * float(np.median(latencies)), 3) if latencies else None,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if films and job.video and (job.record == "all" or not seen.success):
        write_video(Path(job.video), frames)
        line["video"] = Path(job.video).name
    return line


def _frame(seen: Observation) -> np.ndarray:
    """All cameras side by side."""
    return np.concatenate(list(seen.images.values()), axis=1)


def _check_video() -> None:
    """Better before the episode than after it."""
    if find_spec("av") is None:
        raise UserError("videos need the package av in the simulator's environment; install it, or set record=none")


def write_video(path: Path, frames: list[np.ndarray]) -> None:
    """An MP4 that browsers play. Sides are made even, which the codec wants."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = (side - side % 2 for side in frames[0].shape[:2])
    with av.open(str(path), "w", options={"movflags": "faststart"}) as video:
        stream = video.add_stream("libx264", rate=VIDEO_FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for image in frames:
            cut = np.ascontiguousarray(image[:height, :width])
            video.mux(stream.encode(av.VideoFrame.from_ndarray(cut, format="rgb24")))
        video.mux(stream.encode())


def job_from(message: dict[str, Any]) -> Job:
    """A job as it came over a pipe."""
    return Job(**message)
