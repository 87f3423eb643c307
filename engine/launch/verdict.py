"""What a run comes to when its processes have ended: one status, one cause, said once."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.paths import newest
from engine.errors import EXIT_INTERRUPTED, EXIT_USER
from engine.faults.board import Seen
from engine.rundir import RunFolder
from engine.schema import Run

LOG_LINES = 15
STOPPED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))  # on request, unsaved


@dataclass(frozen=True)
class Verdict:
    """The exit status of a run, why it has it, and lines that show more of it."""

    status: int
    message: str | None = None
    more: tuple[str, ...] = ()
    consequence: bool = False  # of another rank's failure
    at: float = 0.0  # when it was said


def failure(name: str, status: int, seen: Seen | None, log: Path | None) -> Verdict:
    """How one worker failed: by a signal, in its own words, or by its exit status and the end of its log."""
    if status > 128:
        where = f" in {seen.operation}" if seen and seen.operation else ""
        hint = "; the system does this when memory runs out" if status == 128 + signal.SIGKILL else ""
        return Verdict(status, f"{name} was killed by {signal.Signals(status - 128).name}{where}{hint}", _tail(log))
    if seen is not None and seen.note is not None:
        return of_note(seen)
    if status == EXIT_USER:
        said = [line.removeprefix("error: ") for line in _lines(log) if line.startswith("error: ")]
        return Verdict(status, said[-1] if said else f"{name} refused to start", () if said else _tail(log))
    return Verdict(status, f"{name} ended with exit status {status}", _tail(log))


def of_note(seen: Seen) -> Verdict:
    """What a rank said of its own end."""
    note = seen.note or {}
    code, message = int(note.get("code", 1)), str(note.get("message", ""))
    consequence, at = bool(note.get("consequence")), float(note.get("at", 0.0))
    if code == EXIT_USER:
        return Verdict(code, message, (), consequence, at)
    more = tuple(str(note.get("traceback", "")).splitlines())
    return Verdict(code, f"rank {seen.rank} failed: {message}", more, consequence, at)


def order(verdict: Verdict) -> tuple[bool, bool, float]:
    """The likeliest cause first: a killed rank, then one that did not fail for want of another, then the earliest."""
    return verdict.status <= 128, verdict.consequence, verdict.at


def settle(verdict: Verdict, run: Run, folder: RunFolder) -> int:
    """Say the cause on the terminal and in `result.json`; the exit status."""
    if verdict.message is None:
        return verdict.status
    stopped = verdict.status in (EXIT_INTERRUPTED, *STOPPED)
    print(verdict.message if stopped else f"error: {verdict.message}", file=sys.stderr)
    for line in verdict.more:
        print(f"  {line}", file=sys.stderr)
    if verdict.status != EXIT_INTERRUPTED and not run.launcher.node_rank:
        _record(verdict, run, folder)
    return verdict.status


def _record(verdict: Verdict, run: Run, folder: RunFolder) -> None:
    """Put the cause where rank 0 could only write what it saw of it, or could not write at all."""
    path = folder.path / "result.json"
    try:
        fresh = path.stat().st_mtime >= folder.started
        result = json.loads(path.read_text()) if fresh else {}
    except (OSError, ValueError):
        fresh, result = False, {}
    stopped, kept = verdict.status in STOPPED, folder.kept()
    if not fresh and not kept and (not folder.created or stopped or verdict.status == EXIT_USER):
        return  # nothing came of it: what lies there is of an earlier run
    last = newest(folder.path) if run.job.name == "train" else None
    status = "interrupted" if stopped else "failed"
    result = {"job": run.job.name, "family": run.family} | result | {"status": status, "message": verdict.message}
    if run.job.name == "train" and stopped:
        result["message"] += f"; the last checkpoint is {last.name}" if last else "; no checkpoint was saved"
    if last is not None:
        result["checkpoint"] = str(last)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)
    if run.job.name == "train":
        from engine.report import write_report

        write_report(folder.path)


def _tail(log: Path | None) -> tuple[str, ...]:
    lines = _lines(log)[-LOG_LINES:]
    return (f"the last lines of {log}:", *(f"  {line}" for line in lines)) if lines else ()


def _lines(log: Path | None, size: int = 16384) -> list[str]:
    if log is None or not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read().decode(errors="replace").splitlines()
