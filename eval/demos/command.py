"""`zoo demos` and `zoo demos-replay`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.errors import UserError
from engine.verbs import read_words
from eval.demos.recorder import record
from eval.demos.replay import replay
from eval.demos.settings import DemoSettings, ReplaySettings
from eval.settings import described, read

HELP = described(
    "Records demonstrations of a scripted expert in a simulator: a LeRobot dataset (version 3) with videos.",
    "zoo demos suite=NAME output=DIR [key=value ...]",
    DemoSettings,
)
REPLAY_HELP = described(
    "Carries the recorded actions of a dataset of `zoo demos` out again, open loop, and counts successes.",
    "zoo demos-replay DIR [key=value ...]",
    ReplaySettings,
)


def recording(words: list[str]) -> int:
    """`zoo demos`."""
    given = read_words("zoo demos", HELP, words)
    if given is None:
        return 0
    with Bar("recording") as bar:
        made = record(read(DemoSettings, given[0]), bar.note, bar)
    if given[1]:
        print(json.dumps(made, indent=1))
    else:
        print(f"{made['folder']}: {made['episodes']} episodes, {made['frames']} frames")
        print(
            f"no episode begins at an initial state before {made['first_state']}: evaluate on those, with fewer trials"
        )
    return 0


def replaying(words: list[str]) -> int:
    """`zoo demos-replay`: status 1 if an episode fails."""
    given = read_words("zoo demos-replay", REPLAY_HELP, words)
    if given is None:
        return 0
    folders = [word for word in given[0] if "=" not in word]
    if len(folders) != 1:
        raise UserError("name one folder that `zoo demos` wrote")
    settings = read(ReplaySettings, [word for word in given[0] if "=" in word])
    with Bar("replaying") as bar:
        lines = replay(Path(folders[0]).expanduser(), settings, bar.note, bar)
    good = sum(line["success"] for line in lines)
    print(json.dumps(lines, indent=1) if given[1] else f"{good} of {len(lines)} episodes succeed again")
    return 0 if good == len(lines) else 1


class Bar:
    """A bar with the time that is left on a terminal, a line for each episode elsewhere; both on stderr."""

    def __init__(self, what: str) -> None:
        self.what, self.started, self.shown = what, time.monotonic(), -1
        self.console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("episodes"))
        self.bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True)
        self.task = self.bar.add_task(what, total=None)

    def __call__(self, done: int, wanted: int) -> None:
        self.bar.update(self.task, completed=done, total=wanted)
        if not self.console.is_terminal and done != self.shown:
            pace = f", {time.monotonic() - self.started:.0f} s" if self.shown >= 0 else ""
            print(f"{self.what}: {done}/{wanted} episodes{pace}", file=sys.stderr, flush=True)
        self.shown = done

    def note(self, line: str) -> None:
        """A line above the bar."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Bar:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.stop()
