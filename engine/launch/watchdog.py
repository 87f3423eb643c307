"""Ranks that make no progress: which one is behind, in what, and where every rank stands."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.faults.board import Board, Seen
from engine.launch.verdict import Verdict

HELD_UP_S = 5.0  # between two looks, which are otherwise fractions of a second apart
DUMP_S = 2.0  # a rank that can still write its stacks has done so by then
STATES = {
    "T": "it is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "a debugger holds it",
    "D": "it waits for a disk or a network file system",
    "Z": "it is dead",
    "": "it is gone",
}
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
COLLECTIVE = ("torch/distributed/", "pipeline_parallel/p2p_communication")  # frames in which a rank waits for others


@dataclass(frozen=True)
class Standing:
    """Where one rank stands: what the system says of it, and its innermost frames."""

    seen: Seen
    state: str
    frames: tuple[str, ...]

    @property
    def waits(self) -> bool:
        """For other ranks."""
        return any(part in frame for frame in self.frames[:8] for part in COLLECTIVE)


class Watchdog:
    """Looks at the ranks of one machine. A rank is expected to move on within `timeout_s` once it has begun to."""

    def __init__(self, board: Board, timeout_s: float, logs: Path) -> None:
        self._board, self._timeout, self._logs = board, timeout_s, logs
        self._looked = self._since = time.monotonic()

    def stall(self) -> Verdict | None:
        """None while all ranks move on; else every rank has dumped its stacks, and this says who is behind."""
        if not self._late(time.monotonic()):
            return None
        ranks = [seen for seen in self._board.seen() if not seen.note]
        return Verdict(1, explain(self._dump(ranks), self._timeout, self._logs))

    def _late(self, now: float) -> bool:
        if now - self._looked > HELD_UP_S:
            self._since = now  # the whole machine may have been held up: the ranks get their time anew
        self._looked = now
        ranks = (seen for seen in self._board.seen() if seen.at and not seen.note)
        return any(now - max(seen.at, self._since) > self._timeout for seen in ranks)

    def _dump(self, ranks: list[Seen]) -> list[Standing]:
        """Have the ranks write their stacks into their logs, and read there where they stand."""
        logs = {seen.rank: self._logs / f"rank_{seen.rank}.log" for seen in ranks}
        begin = {rank: _size(log) for rank, log in logs.items()}
        states = {seen.rank: _state(seen.pid) for seen in ranks}
        for seen in ranks:
            with suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_S
        awake = [rank for rank, state in states.items() if state not in STATES]
        while time.monotonic() < deadline and not all(_size(logs[rank]) > begin[rank] for rank in awake):
            time.sleep(0.05)
        time.sleep(0.2)  # for the rest of what has begun to come
        return [Standing(s, states[s.rank], _main_thread(logs[s.rank], begin[s.rank])) for s in ranks]


def explain(standings: list[Standing], timeout_s: float, logs: Path) -> str:
    """One line: who is behind, what it is in, and where the stacks are."""
    where = f"the stacks of all ranks are in {logs}/rank_*.log; faults.timeout_s sets the patience"
    begin = f"no progress for {timeout_s:g} s:"
    behind = _behind(standings)
    if not behind:
        operations = " and ".join(sorted({s.seen.operation for s in standings}))
        return f"{begin} every rank of this machine waits for others in {operations}; {where}"
    said = []
    for standing in behind:
        why = STATES.get(standing.state) or (f"at {standing.frames[0]}" if standing.frames else "it does not answer")
        said.append(f"rank {standing.seen.rank} is behind in {standing.seen.operation}, {why}")
    return f"{begin} {'; '.join(said)}; {where}"


def _behind(standings: list[Standing]) -> list[Standing]:
    """Ranks that the system holds; else those with the fewest marks; else those that do not wait for others."""
    held = [s for s in standings if s.state in STATES]
    most = max((s.seen.beats for s in standings), default=0)
    fewer = [s for s in standings if s.seen.beats < most]
    return held or fewer or [s for s in standings if not s.waits]


def _state(pid: int) -> str:
    """One letter, proc(5); empty for no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _main_thread(log: Path, begin: int) -> tuple[str, ...]:
    """The frames of the main thread, innermost first: faulthandler writes that thread last."""
    if not log.is_file():
        return ()
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    block = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)[-1]
    return tuple(f"{m['file']}:{m['line']} ({m['name']})" for m in FRAME.finditer(block))
