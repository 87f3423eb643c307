"""Simulator processes: started, watched, restarted, and given episodes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional, Protocol

import engine
import eval as ours
from engine.errors import UserError

ENDED = {"event": "ended"}


class Job(Protocol):
    """An episode, a dataclass whose fields are the message to the worker."""

    @property
    def task(self) -> int: ...

    @property
    def episode(self) -> int: ...


class Lost(Exception):
    """The simulator crashed, stalled or failed; another may do better."""


class Process:
    """One worker process. Its log is a file, its stdin and stdout are ours."""

    def __init__(self, python: str, source: Path, log: Path, settings: Mapping[str, str]) -> None:
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        env |= {"PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1", **settings}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [python, "-m", "eval.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                start_new_session=True,  # a Ctrl-C is for the runner, which then ends the workers
            )
        self.log = log
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            try:
                self._lines.put(json.loads(line))
            except ValueError:
                break
        self._lines.put(ENDED)

    def send(self, message: dict[str, Any]) -> None:
        """One message. Lost if nobody takes it."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Lost(f"the simulator's process ended{self._why()}") from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The event that ends what was sent. Lost after `timeout_s` without a sign of life; UserError for mistakes."""
        while True:
            try:
                event = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                raise Lost(f"the simulator gave no sign of life for {timeout_s:.0f} s") from None
            if event is ENDED:
                raise Lost(f"the simulator's process ended{self._why()}")
            if event["event"] == "error":
                if event["kind"] == "simulator":
                    raise Lost(event["message"])
                raise UserError(event["message"])
            if event["event"] != "step":
                return event

    def _why(self) -> str:
        self.process.poll()
        code = self.process.returncode
        how = f" by {signal.Signals(-code).name}" if code is not None and code < 0 else ""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        said = f" ({lines[-1][:200]})" if lines and not how else ""
        return how + said

    def kill(self) -> None:
        """End the process and whatever it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.process.wait()


class Pool:
    """Workers that play a list of jobs; each job's line goes to `done`, in the order of their ends."""

    def __init__(
        self,
        python: str,
        opening: dict[str, Any],
        folder: Path,
        workers: int,
        retries: int,
        stall_s: float,
        settings: Mapping[str, str],
        note: Callable[[str], None],
        do: str = "play",
    ) -> None:
        """`do` names what a worker does with a job."""
        self.do = do
        self.python, self.opening, self.folder, self.workers = python, opening, folder, workers
        self.retries, self.stall_s, self.settings, self.note = retries, stall_s, settings, note
        self._source = tempfile.TemporaryDirectory(prefix="zooforge-")
        source = Path(self._source.name)
        # Only these two packages, not all that is installed beside them, reach the simulator's environment.
        for package in (engine, ours):
            (source / package.__name__).symlink_to(Path(str(package.__file__)).parent)
        self._lock = threading.Lock()
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._processes: dict[int, Process] = {}
        self._idle: dict[int, tuple[Optional[Process], Optional[int]]] = {}  # and the task that is open
        self._closed = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            processes = list(self._processes.values())
        for process in processes:
            process.kill()
        self._source.cleanup()

    def start(self, number: int) -> Process:
        """A worker with its simulator taken up. Lost and UserError as in `Process.answer`."""
        with self._lock:
            if self._closed:
                raise Lost("the run is over")
            log = self.folder / f"worker_{number}.log"
            process = Process(self.python, Path(self._source.name), log, self.settings)
            self._processes[number] = process
        process.send({"do": "open", **self.opening})
        process.answer(self.stall_s)
        return process

    def run(self, jobs: Sequence[Job], done: Callable[[dict[str, Any]], None]) -> None:
        """Play all. The first UserError of a worker ends the run, after what others finished until then."""
        waiting = list(jobs)
        count = min(self.workers, len(waiting))
        for number in range(count):
            threading.Thread(target=self._work, args=(number, waiting), daemon=True).start()
        while count:
            kind, value = self._events.get()
            if kind == "line":
                done(value)
            elif kind == "error":
                raise value
            else:
                count -= 1

    def _work(self, number: int, waiting: list[Job]) -> None:
        process, task = self._idle.pop(number, (None, None))
        try:
            while job := self._next(waiting, task):
                task = job.task
                process, line = self._play(number, process, job)
                self._events.put(("line", line))
        except BaseException as error:
            self._events.put(("error", error))
            if process:
                process.kill()
        else:
            self._idle[number] = process, task  # for the next list; whatever is left ends with the pool
        finally:
            self._events.put(("end", None))

    def _next(self, waiting: list[Job], task: Optional[int]) -> Optional[Job]:
        """The next episode of the task that is open, else of the task with most left: opening one takes seconds."""
        with self._lock:
            if not waiting or self._closed:
                return None
            left = {job.task: 0 for job in waiting}
            for job in waiting:
                left[job.task] += 1
            chosen = task if task in left else max(left, key=lambda t: left[t])
            return waiting.pop(next(i for i, job in enumerate(waiting) if job.task == chosen))

    def _play(self, number: int, process: Optional[Process], job: Job) -> tuple[Optional[Process], dict[str, Any]]:
        why = ""
        for attempt in range(1, self.retries + 2):
            try:
                process = process or self.start(number)
                process.send({"do": self.do, **asdict(job)})
                line = {"task": job.task, "episode": job.episode} | process.answer(self.stall_s)["line"]
                return process, line | {"attempts": attempt, "worker": number}
            except Lost as lost:
                why = str(lost)
                if process or number in self._processes:
                    (process or self._processes[number]).kill()
                process = None
                if self._closed:
                    raise
                self.note(f"task {job.task}, episode {job.episode}: {why}; attempt {attempt} of {self.retries + 1}")
        line = {"task": job.task, "episode": job.episode, "prompt": "", "success": False, "steps": 0}
        return None, line | {"reason": f"simulator: {why}", "attempts": self.retries + 1, "worker": number}
