"""A simulator's process: `python -m eval.worker`, in the simulator's own environment and never with torch.

Lines of JSON come on stdin (`open` once, then `play` for each episode) and go to stdout: `opened`, `step`, `done`, or
`error` with whether it is a mistake of the user's that no repetition would mend. What the simulator prints goes to
stderr. At the end of stdin the process ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any, Optional

from engine.errors import UserError
from engine.policy.conventions import Conventions, parse
from eval.client import Client, ServerGone
from eval.episode import job_from, play, policy_conventions

SIMULATORS = {"libero": "eval.libero.simulator:Libero", "toy": "eval.toy.simulator:Toy"}
PULSE_S = 1.0


class Worker:
    """One simulator and one connection to the policy."""

    def __init__(self, out: Any) -> None:
        self.out = out
        self.simulator: Any = None
        self.client: Optional[Client] = None
        self.last = 0.0

    def say(self, event: str, **values: Any) -> None:
        """One line to the runner."""
        self.out.write(json.dumps({"event": event, **values}) + "\n")
        self.out.flush()

    def open(self, message: dict[str, Any]) -> None:
        """Take the simulator up and connect."""
        from importlib import import_module

        self.benchmark: Conventions = parse(message["conventions"], "the benchmark")
        module, _, name = SIMULATORS[message["benchmark"]].partition(":")
        self.policy = self.benchmark
        if message["server"]:  # an expert that records demonstrations needs none
            self.client = Client(message["server"], message.get("token"))
            self.policy = policy_conventions(self.client, self.benchmark)
        self.simulator = getattr(import_module(module), name)(message["setup"])
        self.say("opened")

    def play(self, message: dict[str, Any]) -> None:
        """One episode."""
        assert self.client is not None
        line = play(self.simulator, self.client, self.policy, self.benchmark, job_from(message), self._alive)
        self.say("done", line=line)

    def replay(self, message: dict[str, Any]) -> None:
        """The actions of a demonstration, as the policy would give them, through the adapter."""
        from eval.check import replay

        self.say("done", line=replay(self.simulator, self.policy, self.benchmark, message, self._alive))

    def record(self, message: dict[str, Any]) -> None:
        """A demonstration of an expert that acts in this process."""
        from eval.demos.act import Recording, record

        self.say("done", line=record(self.simulator, self.benchmark, Recording(**message), self._alive))

    def _alive(self, step: int) -> None:
        now = time.monotonic()
        if now - self.last > PULSE_S:
            self.last = now
            self.say("step", step=step)

    def run(self) -> None:
        """Until stdin ends."""
        for line in sys.stdin:
            message = json.loads(line)
            try:
                getattr(self, message.pop("do"))(message)
            except ServerGone as error:
                self.say("error", kind="server", message=str(error))
            except UserError as error:
                self.say("error", kind="user", message=str(error))
            except Exception as error:
                traceback.print_exc()
                self.say("error", kind="simulator", message=f"{type(error).__name__}: {error}")


def main() -> None:
    """Keep stdout for the runner alone."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Worker(out).run()
    out.flush()
    os._exit(0)  # renderers take long to end, or fail to


if __name__ == "__main__":
    main()
