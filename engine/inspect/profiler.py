"""`profile=true`: torch's profiler over chosen steps, and what an accelerator's allocator did in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from torch.profiler import profile

from engine.checks import FIRST_TRACED
from engine.metrics.text import percent
from hardware.base import Hardware

FOLDER = "profile"
FIRST, LAST = FIRST_TRACED, 5  # of the steps that a command takes
DEAREST = 12  # operations that the table shows


def spans(steps: list[int]) -> dict[int, int]:
    """The first and last step of each run of consecutive ones."""
    found: dict[int, int] = {}
    for step in sorted(set(steps)):
        before = next((first for first, last in found.items() if last == step - 1), None)
        found[step if before is None else before] = step
    return found


class Profiler:
    """Writes `profile/trace_steps_A-B_rank_R.json.gz` (for chrome://tracing or Perfetto) of each run of chosen steps.

    On accelerators `memory_steps_A-B_rank_R.json.gz` lies beside it: what torch's allocator records of every
    allocation. Rank 0 also writes the dearest operations, `operations_steps_A-B.txt`, and says them.
    """

    def __init__(
        self,
        steps: Optional[list[int]],
        start: int,
        end: int,
        hardware: Hardware,
        run_dir: Path,
        rank: int,
        say: Callable[[str], None],
    ) -> None:
        """`steps` None: the third to fifth after `start`, the step that the run goes on from, up to `end`, its last."""
        self._spans = spans(list(range(start + FIRST, min(start + LAST, end) + 1)) if steps is None else steps)
        self._hardware, self._folder, self._rank, self._say = hardware, run_dir / FOLDER, rank, say
        self._running: Optional[tuple[int, Any]] = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step, whether it is a chosen one or not."""
        if step in self._spans:
            self._begin(step)
        yield
        if self._running is not None and self._spans[self._running[0]] == step:
            self._end(step)

    def close(self) -> None:
        """End what a run that ends early leaves running."""
        if self._running is not None:
            self._running[1].__exit__(None, None, None)
            self._hardware.record_memory(False)
            self._running = None

    def _begin(self, step: int) -> None:
        self._hardware.synchronize()
        self._hardware.record_memory(True)
        running = profile(activities=self._hardware.profiler_activities())
        running.__enter__()
        self._running = (step, running)

    def _end(self, step: int) -> None:
        first, running = self._running
        self._running = None
        self._hardware.synchronize()
        running.__exit__(None, None, None)
        snapshot = self._hardware.memory_snapshot()
        self._hardware.record_memory(False)
        self._folder.mkdir(exist_ok=True)
        steps = f"steps_{first}-{step}"
        running.export_chrome_trace(str(self._folder / f"trace_{steps}_rank_{self._rank}.json.gz"))
        if snapshot is not None:
            with gzip.open(self._folder / f"memory_{steps}_rank_{self._rank}.json.gz", "wt") as file:
                json.dump(snapshot, file, default=str)
        if self._rank == 0:
            text = operations(running.key_averages(), self._hardware.device_type, step - first + 1)
            (self._folder / f"operations_{steps}.txt").write_text(text + "\n")
            self._say(f"{text}\nprofile of steps {first} to {step}: {self._folder}")


def operations(averages: Any, device_type: str, steps: int) -> str:
    """A table of the operations that take most time themselves, on the device where there is one."""
    where = "cpu" if device_type == "cpu" else "device"
    found = sorted(((getattr(a, f"self_{where}_time_total"), a.count, a.key) for a in averages), reverse=True)
    total = sum(time for time, _, _ in found) or 1.0
    lines = [f"{'ms a step':>10}  {'share':>6}  {'calls a step':>12}  operation ({where} time)"]
    for time, calls, key in found[:DEAREST]:
        lines.append(f"{time / 1e3 / steps:>10.3f}  {percent(time / total):>6}  {calls / steps:>12.1f}  {key[:70]}")
    return "\n".join(lines)
